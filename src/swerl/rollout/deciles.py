"""Who is trained: tokens sampled against tokens trained, by length of the Episode.

A schedule that favours short Episodes shows here: the last tenths are sampled and not trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from swerl.runs.prompts import Entry

TENTHS = 10


@dataclass(frozen=True, slots=True)
class Decile:
    """One tenth of all Episodes, in the order of their lengths."""

    sampled: int
    """Tokens."""
    trained: int
    """Tokens of them that were trained on."""


class Deciles:
    """Collects a run's Episodes."""

    def __init__(self, past: Iterable[Entry] = ()) -> None:
        self._lengths: list[tuple[int, bool]] = []
        self.add(past)

    def add(self, entries: Iterable[Entry]) -> None:
        """Take the Episodes of Groups whose fate is known."""
        for entry in entries:
            self._lengths += zip(entry.lengths, entry.learned, strict=True)

    def tenths(self) -> list[Decile]:
        """Return the tenths, from the shortest Episodes to the longest."""
        ordered = sorted(self._lengths, key=lambda each: each[0])
        bounds = [round(tenth * len(ordered) / TENTHS) for tenth in range(TENTHS + 1)]
        parts = [ordered[start:stop] for start, stop in pairwise(bounds)]
        return [
            Decile(
                sampled=sum(length for length, _ in part),
                trained=sum(length for length, is_trained in part if is_trained),
            )
            for part in parts
        ]

    def metrics(self) -> dict[str, float]:
        """Return the tenths of the whole run as metrics, `…_d1` for the shortest Episodes."""
        found: dict[str, float] = {}
        for number, tenth in enumerate(self.tenths(), 1):
            found[f"sampled_tokens_d{number}"] = tenth.sampled
            found[f"trained_tokens_d{number}"] = tenth.trained
        return found
