"""One forward pass's input: rows packed end to end, or the part of them that a context rank holds.

Axes: N positions of this context rank, M of all of them, S selected positions of all of them, O
those of the S that this rank holds, L layers with experts, K experts of a position.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swerl.core import experts
from swerl.core.errors import TrainerError
from swerl.core.sample import Sample
from swerl.training.rank.context import Share


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The input of one forward pass."""

    ids_N: torch.Tensor
    """Input token ids of all rows, end to end."""
    lengths: tuple[int, ...]
    """Positions of each whole row with its padding; their sum is M."""
    selected_O: torch.Tensor
    """Positions, of N, whose next token's log-probability is wanted."""
    labels_O: torch.Tensor
    """The next token at each of them."""
    place_O: torch.Tensor
    """Which of all the selected they are."""
    num_selected: int
    """S."""
    routed_NLK: torch.Tensor | None = None
    """Experts that the engine chose, -1 where it left no record; none where no row has one."""


def pack_rows(
    samples: Sequence[Sample],
    selected: tuple[torch.Tensor, torch.Tensor],
    share: Share,
    device: torch.device,
    *,
    replay: bool,
) -> PackedRows:
    """Pack rows. `selected` are row and position of the wanted tokens, row by row."""
    lengths = share.pad([len(sample.ids) - 1 for sample in samples])
    starts_B = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    ids_M, labels_M = (_end_to_end(samples, lengths, offset) for offset in (0, 1))
    held_N = share.positions(lengths)
    place_M = torch.full((sum(lengths),), -1)
    row_S, position_S = (index.cpu() for index in selected)
    place_M[starts_B[row_S] + position_S] = torch.arange(len(row_S))
    selected_O = (place_M[held_N] >= 0).nonzero().squeeze(1)
    routed_NLK = _routed(samples, starts_B.tolist(), sum(lengths)) if replay else None
    if routed_NLK is not None and share.context_ranks > 1:  # else all are held, in this order
        routed_NLK = routed_NLK[held_N]
    return PackedRows(
        ids_N=ids_M[held_N].to(device),
        lengths=lengths,
        selected_O=selected_O.to(device),
        labels_O=labels_M[held_N[selected_O]].to(device),
        place_O=place_M[held_N[selected_O]].to(device),
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
    """Return recorded experts by position, layer and rank of choice; none where none is."""
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
        chosen = np.frombuffer(ids, f"u{piece.bytes_per_id}").reshape(-1, *shape)
        found[start : start + piece.num_positions] = chosen
    return torch.from_numpy(found)
