"""What the ledger knows about sandboxes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.core.chat import Json
from swerl.core.liveness import ProcessIdentity

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Head:
    """What all sandboxes of one file share."""

    backend: str
    settings: Mapping[str, Json]
    """The backend's settings, secrets left out: what it takes to reach the provider again."""
    run: str
    """What the sandboxes are used for."""
    owner: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Entry:
    """One sandbox, from the intent to its end. Times are seconds since 1970, 0 for not yet."""

    name: str
    image: str
    intended_s: float
    lifetime_s: float
    price: float = 0.0
    """US dollars an hour."""
    id: str = ""
    """What the provider calls it."""
    opened_s: float = 0.0
    ended_s: float = 0.0
    why: str = ""
    """Why it ended, or why it is in doubt."""
    in_doubt: bool = False
    """Whether it should be gone without anybody having seen that it is."""

    @property
    def deadline_s(self) -> float:
        """When its lifetime is over."""
        return (self.opened_s or self.intended_s) + self.lifetime_s

    def is_settled(self, now_s: float) -> bool:
        """Say whether it is gone for good.

        A paid one without an answer may still appear at its provider, until its deadline.
        """
        may_appear = self.price and not self.opened_s and now_s < self.deadline_s
        return bool(self.ended_s) and not may_appear

    def seconds(self, now_s: float) -> float:
        """Return how long it has lived until it ended, or until `now_s`."""
        return max((self.ended_s or now_s) - self.opened_s, 0.0) if self.opened_s else 0.0

    def cost(self, now_s: float) -> float:
        """Return its cost so far in US dollars."""
        return self.seconds(now_s) / HOUR_S * self.price


@dataclass(frozen=True, slots=True)
class Sum:
    """Ended sandboxes of one run and backend that began in the same hour (or day)."""

    began_s: float
    run: str
    backend: str
    num_sandboxes: int = 0
    seconds: float = 0.0
    cost: float = 0.0

    def plus(self, other: Sum) -> Sum:
        """Return both in one."""
        return replace(
            self,
            num_sandboxes=self.num_sandboxes + other.num_sandboxes,
            seconds=self.seconds + other.seconds,
            cost=self.cost + other.cost,
        )


@dataclass(slots=True)
class Page:
    """One file of the ledger."""

    path: Path
    head: Head
    entries: dict[str, Entry] = field(default_factory=dict)
    sums: list[Sum] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Entry]:
        """The sandboxes without an end."""
        return [entry for entry in self.entries.values() if not entry.ended_s]

    @property
    def is_settled(self) -> bool:
        """Whether every sandbox is gone for good."""
        now_s = time.time()
        return all(entry.is_settled(now_s) for entry in self.entries.values())


def fold(entries: Iterable[Entry], head: Head) -> list[Sum]:
    """Add up ended sandboxes by the hour in which they began; what never was counts nothing."""
    return add_up(
        Sum(
            entry.opened_s // HOUR_S * HOUR_S,
            head.run,
            head.backend,
            num_sandboxes=1,
            seconds=entry.seconds(entry.ended_s),
            cost=entry.cost(entry.ended_s),
        )
        for entry in entries
        if entry.opened_s
    )


def add_up(sums: Iterable[Sum]) -> list[Sum]:
    """Add up what began in the same hour for the same run and backend."""
    totals: dict[tuple[float, str, str], Sum] = {}
    for each in sums:
        key = (each.began_s, each.run, each.backend)
        totals[key] = totals[key].plus(each) if key in totals else each
    return list(totals.values())
