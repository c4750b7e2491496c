"""The queue's rules, and their effect on slow Tasks over a simulated run."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from swerl.rollout.schedules import QueueBounds, choose_groups, may_start
from swerl.runs.prompts import Fate, GroupEntry

BOUNDS = QueueBounds(groups=2, staleness=2, pool=4)


@dataclass(frozen=True, slots=True)
class Group:
    """A Group of one Episode that takes as long as it has tokens."""

    began: int
    is_finished: bool
    length: int = 1


def test_no_more_begin_than_can_be_trained_in_time_or_the_pool_holds() -> None:
    assert may_start(3, BOUNDS, served=5, trained_next=6)
    assert not may_start(4, BOUNDS, served=5, trained_next=5)
    tight = QueueBounds(groups=2, staleness=1, pool=9)
    assert may_start(1, tight, served=5, trained_next=6)
    assert not may_start(2, tight, served=5, trained_next=6)


def test_a_slow_group_lets_others_pass_until_it_is_due() -> None:
    slow, first, second = Group(3, False), Group(3, True), Group(4, True)
    waiting = [slow, first, second]
    assert choose_groups(waiting, BOUNDS, version=4, count=2) == [first, second]
    assert choose_groups(waiting, BOUNDS, version=5, count=2) is None
    done = Group(3, True)
    assert choose_groups([done, first, second], BOUNDS, version=5, count=2) == [
        done,
        first,
    ]


def durations(count: int) -> list[int]:
    """Long-tailed, as agents are: a tenth takes ten times as long as the others."""
    draws = random.Random(5)
    return [
        draws.randint(100, 200) if draws.random() < 0.1 else draws.randint(8, 20)
        for _ in range(count)
    ]


@dataclass(slots=True)
class Running:
    """A Group of the simulation."""

    began: int
    length: int
    ends: float
    now: list[float]

    @property
    def is_finished(self) -> bool:
        return self.ends <= self.now[0]


def simulate(bounds: QueueBounds, lengths: list[int], steps: int) -> list[GroupEntry]:
    """Play a run in virtual time and return its ledger; a step trains for 10 units."""
    now, waiting, ledger = [0.0], list[Running](), list[GroupEntry]()
    lengths = list(lengths)

    def note(group: Running, step: int) -> None:
        entry = GroupEntry(step, "t", "s", Fate.TRAINED, lengths=(group.length,), learned=(True,))
        ledger.append(entry)
        waiting.remove(group)

    def fill(served: int, trained_next: int) -> None:
        while lengths and may_start(len(waiting), bounds, served=served, trained_next=trained_next):
            length = lengths.pop(0)
            waiting.append(Running(served, length, now[0] + length, now))

    for step in range(steps):
        fill(step, step)
        while True:
            taken = choose_groups(waiting, bounds, version=step, count=bounds.groups)
            if taken is not None:
                break
            now[0] = min(group.ends for group in waiting if not group.is_finished)
        assert all(step - group.began <= bounds.staleness for group in taken)
        for group in taken:
            note(group, step)
        fill(step, step + 1)
        now[0] += 10
    return ledger


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("pool", [4, 8, 16])
def test_every_group_that_begins_is_trained_within_the_bound(staleness: int, pool: int) -> None:
    bounds = QueueBounds(groups=4, staleness=staleness, pool=pool)
    ledger = simulate(bounds, durations(240), 60)
    assert len(ledger) == 240
    assert all(entry.fate is Fate.TRAINED for entry in ledger)
