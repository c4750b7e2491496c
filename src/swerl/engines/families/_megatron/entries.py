"""One Megatron parameter and the Hugging Face tensors that it is made of.

`join` and `split` undo one another to the bit: they only move numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Join: TypeAlias = "Callable[[Sequence[torch.Tensor]], torch.Tensor]"
Split: TypeAlias = "Callable[[torch.Tensor], Sequence[torch.Tensor]]"


@dataclass(frozen=True, slots=True)
class Entry:
    """How one parameter is read and written."""

    names: tuple[str, ...]
    """Hugging Face's names, after the layer's prefix."""
    join: Join
    split: Split
    other: Entry | None = None
    """Another form in which checkpoints hold it; it is read and never written."""


def same(name: str) -> Entry:
    """Return the entry of a parameter that only changes its name."""
    return Entry((name,), _only, lambda whole: (whole,))


def stacked_halves(first: str, second: str) -> Entry:
    """Return the entry of two matrices of one size, one on top of the other."""
    return Entry((first, second), _cat, lambda whole: whole.chunk(2))


def grouped(names: Sequence[str], rows: Sequence[int], num_groups: int) -> Entry:
    """Return the entry of tensors whose rows stand together by group.

    Tensor number i has `rows[i]` rows a group, and a group holds the tensors' rows one after the
    other. So any cut between groups gives each part whole groups.
    """

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        by_group = [
            part.reshape(num_groups, size, *part.shape[1:])
            for part, size in zip(parts, rows, strict=True)
        ]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        import torch

        by_group = whole.reshape(num_groups, sum(rows), *whole.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(by_group, list(rows), dim=1)]

    return Entry(tuple(names), join, split)


def _only(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    (part,) = parts
    return part


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(list(parts))
