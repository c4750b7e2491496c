"""Weight versions in the order in which they first served, and the staleness of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swerl.core.episode import Episode


class Versions:
    """Every version that has served, oldest first; numbers count from 0."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}

    @property
    def names(self) -> tuple[str, ...]:
        """All versions, oldest first."""
        return tuple(self._numbers)

    @property
    def newest(self) -> int:
        """Number of the newest version, which the trainer holds between its steps."""
        return len(self._numbers) - 1

    def add(self, name: str) -> None:
        """Add a version that serves; a known one keeps its number."""
        self._numbers.setdefault(name, len(self._numbers))

    def number(self, name: str) -> int | None:
        """Return a version's number, None if it never served."""
        return self._numbers.get(name)


@dataclass(frozen=True, slots=True)
class Staleness:
    """Age of tokens: versions between the one that sampled them and the newest."""

    mean: float = 0.0
    """Over tokens."""
    largest: int = 0
    num_tokens: int = 0
    num_stale: int = 0
    """Tokens of an older version than the newest."""
    num_partial: int = 0
    """Replies that more than one version sampled."""


def staleness(episodes: Iterable[Episode], versions: Versions) -> Staleness:
    """Measure the tokens of Episodes against the newest version.

    A version that never served counts as the newest: an engine without weights has its own names.
    """
    turns = [turn for episode in episodes for turn in episode.trajectory.turns]
    spans = [span for turn in turns for span in turn.spans()]
    numbers = [versions.number(name) for name, _ in spans]
    ages = [
        (0 if number is None else versions.newest - number, count)
        for number, (_, count) in zip(numbers, spans, strict=True)
    ]
    num_tokens = sum(count for _, count in ages)
    return Staleness(
        mean=sum(age * count for age, count in ages) / max(num_tokens, 1),
        largest=max((age for age, _ in ages), default=0),
        num_tokens=num_tokens,
        num_stale=sum(count for age, count in ages if age),
        num_partial=sum(bool(turn.weight_changes) for turn in turns),
    )
