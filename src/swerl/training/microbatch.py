"""A rank's part of a Batch, cut into packed micro-batches of tensors.

Axes: B rows, T positions of the longest row less one, N positions of all rows end to end, S
selected positions. Position t of a row stands for the token t + 1, which the model predicts there.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swerl.learning import Batch, LossInputs
from swerl.sample import Sample
from swerl.training import batch as batches


@dataclass(frozen=True, slots=True)
class Row:
    """One Sample and its part of the batch's mean."""

    sample: Sample
    weight: float


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The input of one forward pass."""

    ids_N: torch.Tensor
    """Input token ids of all rows, end to end."""
    lengths: tuple[int, ...]
    """Tokens of each row; their sum is N."""
    selected_S: torch.Tensor
    """Positions whose next token's log-probability is wanted."""
    labels_S: torch.Tensor
    """The next token at each selected position."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads."""

    rows: PackedRows
    row_S: torch.Tensor
    position_S: torch.Tensor
    old_logp_BT: torch.Tensor
    mask_BT: torch.Tensor
    token_BT: torch.Tensor
    advantage_B: torch.Tensor
    weight_B: torch.Tensor
    sampled_B: torch.Tensor
    """1 on rows that an engine sampled, 0 on rows that were written for it."""

    def grid(self, values_S: torch.Tensor) -> torch.Tensor:
        """Lay selected values out as `values_BT`, 0 elsewhere."""
        zeros_BT = torch.zeros_like(self.old_logp_BT)
        return zeros_BT.index_put((self.row_S, self.position_S), values_S)

    def loss_inputs(self, logp_S: torch.Tensor, ref_logp_S: torch.Tensor | None) -> LossInputs:
        """Return what an Algorithm's loss reads."""
        return LossInputs(
            logp_BT=self.grid(logp_S),
            old_logp_BT=self.old_logp_BT,
            ref_logp_BT=None if ref_logp_S is None else self.grid(ref_logp_S),
            mask_BT=self.mask_BT,
            token_BT=self.token_BT,
            advantage_B=self.advantage_B,
            weight_B=self.weight_B,
        )


def rank_rows(batch: Batch, *, rank: int, num_ranks: int) -> list[Row]:
    """Return the rows that a rank trains, longest first; the same split on every rank.

    Each row goes to the rank with the fewest tokens so far. A rank that would have none gets a
    row of weight 0 that trains nothing, so that every rank takes part in every collective call.
    """
    weights = batches.weights(batch)
    rows = [Row(sample, weight) for sample, weight in zip(batch.samples, weights, strict=True)]
    rows.sort(key=lambda row: -len(row.sample.ids))
    parts: list[list[Row]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for row in rows:
        lightest = loads.index(min(loads))
        parts[lightest].append(row)
        loads[lightest] += len(row.sample.ids)
    return parts[rank] or [_idle(rows[-1])]


def cut(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows into micro-batches of at most `max_tokens`; a longer row goes alone."""
    groups: list[list[Row]] = []
    room = 0
    for row in rows:
        tokens = len(row.sample.ids) - 1
        if not groups or tokens > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(row)
        room -= tokens
    return groups


def to_tensors(rows: Sequence[Row], *, all_tokens: bool, device: torch.device) -> MicroBatch:
    """Pack rows. Selected are the trained tokens, or with `all_tokens` the context's too."""
    lengths = tuple(len(row.sample.ids) - 1 for row in rows)
    ids = [torch.tensor(row.sample.ids) for row in rows]
    mask_BT = _pad([row.sample.mask[1:] for row in rows], device)
    token_BT = _pad([[1.0] * length for length in lengths], device)
    wanted_BT = token_BT if all_tokens else mask_BT
    row_S, position_S = wanted_BT.nonzero(as_tuple=True)
    starts_B = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)
    selected_S = starts_B[row_S] + position_S
    return MicroBatch(
        rows=PackedRows(
            ids_N=torch.cat([row[:-1] for row in ids]).to(device),
            lengths=lengths,
            selected_S=selected_S,
            labels_S=torch.cat([row[1:] for row in ids]).to(device)[selected_S],
        ),
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


def _idle(row: Row) -> Row:
    return Row(replace(row.sample, mask=(0,) * len(row.sample.ids)), 0.0)


def _pad(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)
