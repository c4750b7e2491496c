"""Cut a rank's part of a Batch into micro-batches: rows packed end to end, as tensors.

If rows share prefixes, each shared position is in a micro-batch once. Masks, advantages and
log-probabilities stay by row: a row's places in the pack are those of its path.

Axes: B rows, T positions of the longest row less one. N positions of this context rank, M of all
context ranks. S selected positions of all ranks, O those that this rank holds. L layers with
experts, K experts of a position. Position t of a row is that of token t + 1, which is predicted
there.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate

import numpy as np
import torch

from swerl.core import experts
from swerl.core.errors import TrainerError
from swerl.core.learning import Batch, LossInputs, Totals
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts
from swerl.plan.parameters import RowCost
from swerl.training import batch as batches
from swerl.training.rank.context import Forest, RowShare, row_paths
from swerl.training.rank.packing import Prefixes, pack, pack_forest

_WHOLE = RowShare()
_HASH_BYTES = 8
"""Of the experts of a position: rows that differ share one with a probability of 2^-64."""


@dataclass(frozen=True, slots=True)
class WeightedSample:
    index: int
    """Index of the Sample in the Batch."""
    sample: Sample
    weight: float
    shared: int = 0
    """Positions at its beginning that the row before it in the micro-batch has, too."""
    base: Sequence[float] = ()
    """Log-probabilities of its trained tokens in `Batch.base`."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Input of one forward pass: packed rows, or the part of them that a context rank holds."""

    ids_N: torch.Tensor
    """Input token ids of all rows, end to end."""
    lengths: tuple[int, ...]
    """Padded positions that each row adds to the pack; their sum is M."""
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
    forest: Forest | None = None
    """None if no row shares a prefix with another."""

    def executed(self) -> dict[str, float]:
        """Return the computed positions, and the sum of squares that attention's work follows."""
        starts = self.forest.shared if self.forest else (0,) * len(self.lengths)
        ends = [start + length for start, length in zip(starts, self.lengths, strict=True)]
        pairs = sum(end**2 for end in ends) - sum(start**2 for start in starts)
        return {"executed_tokens": float(sum(self.lengths)), "executed_token_pairs": float(pairs)}


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, with the inputs of the loss."""

    rows: PackedRows
    row_S: torch.Tensor
    position_S: torch.Tensor
    old_logp_BT: torch.Tensor
    base_logp_BT: torch.Tensor | None
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

    def trained(self, values_BT: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of each row's trained tokens as float32 on the CPU."""
        counts = self.mask_BT.sum(1, dtype=torch.long).tolist()
        return list(torch.split(values_BT[self.mask_BT > 0].float().cpu(), counts))

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
            base_logp_BT=self.base_logp_BT,
        )


def rank_micro_batches(
    batch: Batch,
    *,
    rank: int,
    num_ranks: int,
    budget: int,
    cost: RowCost,
    share: RowShare = _WHOLE,
    forest: bool = False,
    replay: bool = True,
) -> list[list[WeightedSample]]:
    """Return the rows of each micro-batch of a rank; the same split on every rank.

    No micro-batch has more than `budget` positions, with the padding of `share`, and all ranks have
    the same number of micro-batches. If there are too few rows, a row of weight 0 that trains
    nothing keeps a rank in the collective calls. With `forest` shared prefixes count once; with
    `replay`, too, only if their recorded experts are the same. Raises TrainerError on a row over
    the budget.
    """
    weights = batches.weights(batch)
    base = batch.base or [()] * len(weights)
    rows = [
        WeightedSample(index, sample, weight, base=row_base)
        for index, (sample, weight, row_base) in enumerate(
            zip(batch.samples, weights, base, strict=True)
        )
    ]
    # A row's last token is only a label, so it takes no position.
    sizes = [len(sample.ids) - 1 for sample in batch.samples]
    limits: dict[str, int] = {"num_ranks": num_ranks, "budget": budget}
    if forest and (prefixes := _prefixes(batch.samples, replay=replay)).shares:
        placed = [sizes[index] for index in prefixes.order]
        packs = pack_forest(placed, prefixes, cost, pad=share.pad_row, **limits)
        found = [
            [
                replace(rows[prefixes.order[place]], shared=shared)
                for place, shared in zip(places, prefixes.shared(places), strict=True)
            ]
            for places in packs[rank]
        ]
    else:
        packs = pack(list(map(share.pad_row, sizes)), list(map(cost.of, sizes)), **limits)
        found = [
            [rows[index] for index in sorted(indices, key=lambda index: (-sizes[index], index))]
            for indices in packs[rank]
        ]
    # An empty pack gets a row of weight 0.
    return [each or [_idle(rows[0])] for each in found]


def _prefixes(samples: Sequence[Sample], *, replay: bool) -> Prefixes:
    """Sort rows by their tokens and, with `replay`, by the experts recorded for them."""
    ids = [np.array(sample.ids, np.int32)[:-1] for sample in samples]
    by_ids = Prefixes.of([each.tobytes() for each in ids], width=4)
    if not (replay and by_ids.shares and any(sample.routed for sample in samples)):
        return by_ids
    hashes: dict[RoutedExperts, bytes] = {}
    keys = [b""] * len(samples)
    ends = (*by_ids.common[1:], 0)
    for index, common, after in zip(by_ids.order, by_ids.common, ends, strict=True):
        wide = np.zeros((len(ids[index]), 1 + _HASH_BYTES // 4), np.int32)
        wide[:, 0] = ids[index]
        for piece in samples[index].routed:
            # Beyond its common prefixes a row differs from all others anyway.
            if piece.start < max(common, after):
                found = hashes[piece] = hashes.get(piece) or _hashes(piece)
                end = piece.start + piece.num_positions
                wide[piece.start : end, 1:] = np.frombuffer(found, np.int32).reshape(-1, 2)
        keys[index] = wide.tobytes()
    return Prefixes.of(keys, width=4 + _HASH_BYTES)


def _hashes(piece: RoutedExperts) -> bytes:
    """Return a hash of each position's experts, end to end."""
    [data] = experts.read([piece])
    width = len(data) // piece.num_positions
    parts = (data[start : start + width] for start in range(0, len(data), width))
    return b"".join(blake2b(part, digest_size=_HASH_BYTES).digest() for part in parts)


def _idle(row: WeightedSample) -> WeightedSample:
    sample = replace(
        row.sample, ids=row.sample.ids[:2], mask=(0, 0), logprobs=(0.0, 0.0), routed=()
    )
    return replace(row, sample=sample, weight=0.0, shared=0, base=())


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
    base_logp_BT = None
    if any(row.base for row in rows):
        base_logp_BT = torch.zeros_like(mask_BT)
        values = np.concatenate([np.array(row.base, dtype=np.float32) for row in rows])
        base_logp_BT[mask_BT > 0] = torch.from_numpy(values).to(device)
    return MicroBatch(
        rows=pack_rows(rows, (row_S, position_S), share, device, replay=replay),
        row_S=row_S,
        position_S=position_S,
        old_logp_BT=_pad([row.sample.logprobs[1:] for row in rows], device),
        base_logp_BT=base_logp_BT,
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
    rows: Sequence[WeightedSample],
    selected: tuple[torch.Tensor, torch.Tensor],
    share: RowShare,
    device: torch.device,
    *,
    replay: bool,
) -> PackedRows:
    """Pack rows. `selected` are row and position of the selected tokens, row by row."""
    sizes = [len(row.sample.ids) - 1 for row in rows]
    shared = [row.shared for row in rows]
    new_sizes = [size - depth for size, depth in zip(sizes, shared, strict=True)]
    lengths = share.pad(new_sizes)
    ids_P, labels_P = (_end_to_end(rows, offset) for offset in (0, 1))
    paths = zip(row_paths(lengths, shared), sizes, strict=True)
    place_P = torch.cat([path[:size] for path, size in paths])
    ids_M = torch.zeros(sum(lengths), dtype=torch.long)
    # Rows with a position in common have the same token there.
    ids_M[place_P] = ids_P
    held_N = share.positions(lengths)
    # Index of each position among those that this rank holds, -1 elsewhere.
    held_M = torch.full((sum(lengths),), -1)
    held_M[held_N] = torch.arange(len(held_N))
    row_S, position_S = (index.cpu() for index in selected)
    selected_S = torch.tensor([0, *sizes[:-1]]).cumsum(0)[row_S] + position_S
    place_S = held_M[place_P[selected_S]]
    index_O = (place_S >= 0).nonzero().squeeze(1)
    # Rows start after the padding of the rows before them.
    starts = [0, *accumulate(lengths[:-1])]
    routed_NLK = _routed(rows, starts, sum(lengths)) if replay else None
    if routed_NLK is not None and share.context_ranks > 1:  # a single rank holds all, in this order
        routed_NLK = routed_NLK[held_N]
    segments = [pair for pair in zip(lengths, shared, strict=True) if pair[0]]
    lengths, depths = zip(*segments, strict=True)
    return PackedRows(
        ids_N=ids_M[held_N].to(device),
        lengths=lengths,
        selected_O=place_S[index_O].to(device),
        labels_O=labels_P[selected_S[index_O]].to(device),
        index_O=index_O.to(device),
        num_selected=len(row_S),
        routed_NLK=None if routed_NLK is None else routed_NLK.to(device),
        forest=Forest(lengths, depths) if any(depths) else None,
    )


def _end_to_end(rows: Sequence[WeightedSample], offset: int) -> torch.Tensor:
    """Return the inputs of all rows, or with offset 1 their next tokens."""
    ids = [np.array(row.sample.ids, dtype=np.int64)[offset:] for row in rows]
    return torch.from_numpy(np.concatenate([each[: len(each) - 1 + offset] for each in ids]))


def _routed(
    rows: Sequence[WeightedSample], starts: Sequence[int], num_positions: int
) -> torch.Tensor | None:
    """Return recorded experts by position, layer and choice; None if there is no record."""
    # A shared prefix has its record from the first row with it.
    pieces = [
        (start - row.shared + piece.start, start, piece)
        for start, row in zip(starts, rows, strict=True)
        for piece in row.sample.routed
        if piece.start + piece.num_positions > row.shared
    ]
    shapes = {(piece.num_layers, piece.top_k) for *_, piece in pieces}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise TrainerError(
            f"routed experts of {len(shapes)} shapes [layers, top k] in one micro-batch",
            hint="the engines of a run must serve one model",
        )
    (shape,) = shapes
    found = np.full((num_positions, *shape), -1, np.int16)
    data = experts.read([piece for *_, piece in pieces])
    for (place, start, piece), ids in zip(pieces, data, strict=True):
        # The engine's ids may take one byte or two.
        chosen = np.frombuffer(ids, f"u{piece.bytes_per_id}").reshape(-1, *shape)
        skipped = max(start - place, 0)
        found[place + skipped : place + piece.num_positions] = chosen[skipped:]
    return torch.from_numpy(found)
