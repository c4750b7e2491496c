"""Cut a rank's part of a Batch into micro-batches: rows packed end to end, as tensors.

Axes: B rows, T positions of the longest row less one. N positions of this context rank, M of all
context ranks. S selected positions of all ranks, O those that this rank holds. L layers with
experts, K experts of a position. Position t of a row is that of token t + 1, which is predicted
there.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from swerl.core import experts
from swerl.core.errors import TrainerError
from swerl.core.learning import Batch, LossInputs, Totals
from swerl.core.sample import Sample
from swerl.plan.parameters import RowCost
from swerl.training import batch as batches
from swerl.training.rank.context import RowShare
from swerl.training.rank.packing import pack

_WHOLE = RowShare()


@dataclass(frozen=True, slots=True)
class WeightedSample:
    index: int
    """Index of the Sample in the Batch."""
    sample: Sample
    weight: float


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Input of one forward pass: packed rows, or the part of them that a context rank holds."""

    ids_N: torch.Tensor
    """Input token ids of all rows, end to end."""
    lengths: tuple[int, ...]
    """Padded positions of each whole row; their sum is M."""
    selected_O: torch.Tensor
    """Positions, of N, whose next token's log-probability is computed."""
    labels_O: torch.Tensor
    """The next token at each of them."""
    index_O: torch.Tensor
    """Their indices among all S."""
    num_selected: int
    """S."""
    routed_NLK: torch.Tensor | None = None
    """Experts that the engine chose, -1 without a record; None if no row has a record."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, with the inputs of the loss."""

    rows: PackedRows
    row_S: torch.Tensor
    position_S: torch.Tensor
    old_logp_BT: torch.Tensor
    mask_BT: torch.Tensor
    token_BT: torch.Tensor
    advantage_B: torch.Tensor
    weight_B: torch.Tensor
    sampled_B: torch.Tensor
    """1 on rows that an engine sampled, 0 on written rows such as demonstrations."""

    def grid(self, values_S: torch.Tensor) -> torch.Tensor:
        zeros_BT = torch.zeros_like(self.old_logp_BT)
        # Unlike an assignment, `index_put` passes the gradient on to `values_S`.
        return zeros_BT.index_put((self.row_S, self.position_S), values_S)

    def trained(self, values_S: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of each row's trained tokens as float32 on the CPU."""
        is_trained_S = self.mask_BT[self.row_S, self.position_S] > 0
        counts = self.mask_BT.sum(1, dtype=torch.long).tolist()
        values = values_S[is_trained_S].float().cpu()
        return [values[start:end] for start, end in pairwise(accumulate(counts, initial=0))]

    def loss_inputs(
        self, logp_S: torch.Tensor, ref_logp_S: torch.Tensor | None, totals: Totals
    ) -> LossInputs:
        """Return the inputs of an Algorithm's loss; `totals` are those of the whole batch."""
        return LossInputs(
            logp_BT=self.grid(logp_S),
            old_logp_BT=self.old_logp_BT,
            ref_logp_BT=None if ref_logp_S is None else self.grid(ref_logp_S),
            mask_BT=self.mask_BT,
            token_BT=self.token_BT,
            advantage_B=self.advantage_B,
            weight_B=self.weight_B,
            totals=totals,
        )


def rank_micro_batches(
    batch: Batch, *, rank: int, num_ranks: int, budget: int, cost: RowCost, share: RowShare = _WHOLE
) -> list[list[WeightedSample]]:
    """Return the rows of each micro-batch of a rank; the same split on every rank.

    No micro-batch has more than `budget` positions, with the padding of `share`, and all ranks have
    the same number of micro-batches. If there are too few rows, a row of weight 0 that trains
    nothing keeps a rank in the collective calls. Raises TrainerError on a row over the budget.
    """
    weights = batches.weights(batch)
    rows = [
        WeightedSample(index, sample, weight)
        for index, (sample, weight) in enumerate(zip(batch.samples, weights, strict=True))
    ]
    # A row's last token is only a label, so it takes no position.
    sizes = [len(sample.ids) - 1 for sample in batch.samples]
    costs = [cost.of(size) for size in sizes]
    padded = [share.pad_row(size) for size in sizes]
    packs = pack(padded, costs, num_ranks=num_ranks, budget=budget)
    return [
        [rows[index] for index in sorted(indices, key=lambda index: (-sizes[index], index))]
        # An empty pack gets a row of weight 0.
        or [_idle(rows[0])]
        for indices in packs[rank]
    ]


def _idle(row: WeightedSample) -> WeightedSample:
    sample = replace(
        row.sample, ids=row.sample.ids[:2], mask=(0, 0), logprobs=(0.0, 0.0), routed=()
    )
    return replace(row, sample=sample, weight=0.0)


def to_tensors(
    rows: Sequence[WeightedSample],
    *,
    all_tokens: bool,
    device: torch.device,
    share: RowShare = _WHOLE,
    replay: bool = True,
) -> MicroBatch:
    """Pack rows, or this rank's share of them.

    The trained tokens are selected; with `all_tokens` the context's too. With `replay` the experts
    that the engine recorded are included.
    """
    lengths = [len(row.sample.ids) - 1 for row in rows]
    # Position t predicts token t + 1, so a row's first token has no entry.
    mask_BT = _pad([row.sample.mask[1:] for row in rows], device)
    token_BT = _pad([[1.0] * length for length in lengths], device)
    row_S, position_S = (token_BT if all_tokens else mask_BT).nonzero(as_tuple=True)
    samples = [row.sample for row in rows]
    return MicroBatch(
        rows=pack_rows(samples, (row_S, position_S), share, device, replay=replay),
        row_S=row_S,
        position_S=position_S,
        old_logp_BT=_pad([row.sample.logprobs[1:] for row in rows], device),
        mask_BT=mask_BT,
        token_BT=token_BT,
        advantage_B=torch.tensor([row.sample.advantage for row in rows], device=device),
        weight_B=torch.tensor([row.weight for row in rows], device=device),
        sampled_B=torch.tensor(
            [float(bool(row.sample.weight_versions)) for row in rows], device=device
        ),
    )


def _pad(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    tensors = [torch.from_numpy(np.array(row, dtype=np.float32)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)


def pack_rows(
    samples: Sequence[Sample],
    selected: tuple[torch.Tensor, torch.Tensor],
    share: RowShare,
    device: torch.device,
    *,
    replay: bool,
) -> PackedRows:
    """Pack rows. `selected` are row and position of the selected tokens, row by row."""
    lengths = share.pad([len(sample.ids) - 1 for sample in samples])
    # Rows start after the padding of the rows before them.
    starts_B = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    ids_M, labels_M = (_end_to_end(samples, lengths, offset) for offset in (0, 1))
    held_N = share.positions(lengths)
    # Index of each position among the selected ones, -1 elsewhere.
    index_M = torch.full((sum(lengths),), -1)
    row_S, position_S = (index.cpu() for index in selected)
    index_M[starts_B[row_S] + position_S] = torch.arange(len(row_S))
    selected_O = (index_M[held_N] >= 0).nonzero().squeeze(1)
    routed_NLK = _routed(samples, starts_B.tolist(), sum(lengths)) if replay else None
    if routed_NLK is not None and share.context_ranks > 1:  # a single rank holds all, in this order
        routed_NLK = routed_NLK[held_N]
    return PackedRows(
        ids_N=ids_M[held_N].to(device),
        lengths=lengths,
        selected_O=selected_O.to(device),
        labels_O=labels_M[held_N[selected_O]].to(device),
        index_O=index_M[held_N[selected_O]].to(device),
        num_selected=len(row_S),
        routed_NLK=None if routed_NLK is None else routed_NLK.to(device),
    )


def _end_to_end(samples: Sequence[Sample], lengths: Sequence[int], offset: int) -> torch.Tensor:
    """Lay out the rows' inputs, or with offset 1 their next tokens; padding is token 0."""
    out = torch.zeros(sum(lengths), dtype=torch.long)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        count = len(sample.ids) - 1
        ids = np.array(sample.ids[offset : offset + count], dtype=np.int64)
        out[start : start + count] = torch.from_numpy(ids)
        start += length
    return out


def _routed(
    samples: Sequence[Sample], starts: Sequence[int], num_positions: int
) -> torch.Tensor | None:
    """Return recorded experts by position, layer and choice; None if there is no record."""
    pieces = [
        (start + piece.start, piece)
        for start, sample in zip(starts, samples, strict=True)
        for piece in sample.routed
    ]
    shapes = {(piece.num_layers, piece.top_k) for _, piece in pieces}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise TrainerError(
            f"routed experts of {len(shapes)} shapes [layers, top k] in one micro-batch",
            hint="the engines of a run must serve one model",
        )
    (shape,) = shapes
    found = np.full((num_positions, *shape), -1, np.int16)
    data = experts.read([piece for _, piece in pieces])
    for (start, piece), ids in zip(pieces, data, strict=True):
        # The engine's ids may take one byte or two.
        chosen = np.frombuffer(ids, f"u{piece.bytes_per_id}").reshape(-1, *shape)
        found[start : start + piece.num_positions] = chosen
    return torch.from_numpy(found)
