"""Weight versions in the order in which they began to serve, and how old tokens are by it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swerl.core.episode import Episode
from swerl.core.turn import Turn


class Versions:
    """Every version that has served, oldest first. A version's place counts from 0."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._places = {name: place for place, name in enumerate(names)}

    @property
    def names(self) -> tuple[str, ...]:
        """All versions, oldest first."""
        return tuple(self._places)

    @property
    def newest(self) -> int:
        """Place of the newest version: the one that the trainer holds between its steps."""
        return len(self._places) - 1

    def add(self, name: str) -> None:
        """Note that a version serves; one that is known keeps its place."""
        self._places.setdefault(name, len(self._places))

    def place(self, name: str) -> int | None:
        """Return a version's place, None for one that never served."""
        return self._places.get(name)


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old tokens are, in versions between the one that sampled them and the newest."""

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
    ages = [
        (versions.newest - _place(name, versions), count)
        for turn in turns
        for name, count in spans_of(turn)
    ]
    num_tokens = sum(count for _, count in ages)
    return Staleness(
        mean=sum(age * count for age, count in ages) / max(num_tokens, 1),
        largest=max((age for age, _ in ages), default=0),
        num_tokens=num_tokens,
        num_stale=sum(count for age, count in ages if age),
        num_partial=sum(bool(turn.weight_changes) for turn in turns),
    )


def versions_of(episode: Episode) -> set[str]:
    """Return the versions that sampled an Episode."""
    return {name for turn in episode.trajectory.turns for name, _ in spans_of(turn)}


def spans_of(turn: Turn) -> Iterator[tuple[str, int]]:
    """Yield (version, number of tokens) over a Turn's sampled ids, leaving empty spans out."""
    names = [turn.weight_version, *(change.version for change in turn.weight_changes)]
    bounds = [0, *(change.at for change in turn.weight_changes), len(turn.output_ids)]
    for name, start, stop in zip(names, bounds, bounds[1:], strict=False):
        if stop > start:
            yield name, stop - start


def _place(name: str, versions: Versions) -> int:
    place = versions.place(name)
    return versions.newest if place is None else place
