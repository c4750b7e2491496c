"""The asynchronous pool, with Groups that end on command."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swerl.core.episode import Episode, Group
from swerl.core.errors import RunError
from swerl.core.events import EpisodeEnded, Event, Notice, TurnEnded
from swerl.core.grade import Verdict
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.recipe.schema import RolloutSection, ScheduleSection
from swerl.rollout import group
from swerl.rollout.parts import Parts
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.rollout.schedules import Schedule, ScheduleInputs, open_schedule
from swerl.rollout.step import choose_tasks
from swerl.rollout.versions import Versions
from swerl.runs.layout import Cursor, RunFolder
from tests.unit import made

TASKS = [made.task(f"task{i}") for i in range(12)]
ORDER = [task.id for turn in range(6) for task in choose_tasks(TASKS, turn, 2, seed=0)]
"""Tasks by place."""
START = Cursor()


@dataclass
class Rollouts:
    """A fake of `group.run_one`: it answers as that does, once the test lets a Group end."""

    begun: list[str] = field(default_factory=list)
    """`stage/task`, in the order in which they began."""
    verdicts: Callable[[str], tuple[str, str]] = lambda task: ("solved", "unsolved")
    ends: dict[str, asyncio.Event] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)

    async def run_one(self, task, stage, parts, *, size, folder) -> Group:
        name = f"{stage}/{task.id}"
        self.begun.append(name)
        for k in range(size):
            parts.emit(TurnEnded(f"{name}.{k}", 0, 1, 10 + k, 0.0, "", ()))
        try:
            await self.ends.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return made.group(task.id, *self.verdicts(task.id))

    def end(self, *places: int) -> None:
        """Let the Groups of these places end."""
        for place in places:
            name = f"{place // 2:05d}/{ORDER[place]}"
            self.ends.setdefault(name, asyncio.Event()).set()


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Rollouts:
    fake = Rollouts()
    monkeypatch.setattr(group, "run_one", fake.run_one)
    return fake


def parts_of(told: list[Event], **rollout: Any) -> Parts:
    absent: Any = None
    return made.parts(
        sandboxes=SandboxPool(absent, Limits(), concurrency=2),
        rollout=RolloutSection(groups_per_step=2, episodes_per_group=2, **rollout),
        emit=told.append,
    )


@asynccontextmanager
async def opened(
    told: list[Event] | None = None,
    *,
    cursor: Cursor = START,
    names: tuple[str, ...] = ("v0",),
    rollout: dict[str, Any] | None = None,
    folder: Path = Path("/nowhere"),
    **schedule: Any,
) -> AsyncIterator[Schedule]:
    """Open the pool of a run of six steps with two Groups each."""
    site = ScheduleInputs(
        tasks=TASKS,
        parts=parts_of([] if told is None else told, **(rollout or {})),
        folder=RunFolder(folder),
        section=ScheduleSection(mode="async", **schedule),
        steps=6,
        versions=Versions(names),
    )
    async with open_schedule(site, cursor) as schedule:
        yield schedule


def serves(version: str) -> Callable[[], Any]:
    async def transfer() -> str:
        return version

    return transfer


async def taken(schedule: Schedule, step: int) -> list[str]:
    """Return the Tasks that a step takes, within a generous time."""
    async with asyncio.timeout(30):
        return [one.task_id for one in (await schedule.take(step)).kept]


async def is_waiting(work: asyncio.Task[Any]) -> bool:
    """Let everything happen that can; return whether the work still waits."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not work.done()


async def test_with_staleness_zero_the_steps_are_those_of_a_synchronous_run(rollouts) -> None:
    rollouts.end(*range(12))
    async with opened(max_staleness=0) as schedule:
        for step in range(6):
            assert await taken(schedule, step) == ORDER[2 * step : 2 * step + 2]
            await asyncio.sleep(0)
            assert len(rollouts.begun) == 2 * step + 2  # none begins while the trainer learns
            await schedule.serve(serves(f"v{step + 1}"))
    assert len(rollouts.begun) == 12


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("pool", [1.0, 2.0, 4.0])
async def test_every_group_that_begins_is_trained_once_and_within_the_bound(
    rollouts, staleness: int, pool: float
) -> None:
    """Groups end in any order, and a step takes those that may not wait any longer."""
    draws = random.Random(f"{staleness} {pool}")
    places = draws.sample(range(12), 12)
    began: dict[str, int] = {}
    trained: list[str] = []

    def note_begun(version: int) -> None:
        for name in rollouts.begun:
            began.setdefault(name.partition("/")[2], version)

    async with opened(max_staleness=staleness, pool=pool) as schedule:
        for step in range(6):
            work = asyncio.create_task(taken(schedule, step))
            while await is_waiting(work):
                running = [place for place in places if ORDER[place] in began]
                note_begun(step)
                if running:
                    rollouts.end(running[0])
                    places.remove(running[0])
            trained += await work
            await asyncio.sleep(0)
            note_begun(step)
            assert all(step - began[task] <= staleness for task in trained[2 * step :])
            await schedule.serve(serves(f"v{step + 1}"))
    assert sorted(trained) == sorted(ORDER)


async def test_slow_groups_let_others_pass_and_hold_the_step_in_which_they_are_due(
    rollouts,
) -> None:
    async with opened(max_staleness=2, pool=2.0) as schedule:
        rollouts.end(*range(1, 12))
        assert await taken(schedule, 0) == [ORDER[1], ORDER[2]]
        await schedule.serve(serves("v1"))
        assert await taken(schedule, 1) == [ORDER[3], ORDER[4]]
        await schedule.serve(serves("v2"))
        due = asyncio.create_task(schedule.take(2))
        assert await is_waiting(due)
        rollouts.end(0)
        async with asyncio.timeout(30):
            groups = await due
        assert [one.task_id for one in groups.kept] == [ORDER[0], ORDER[5]]


async def test_the_pool_goes_on_while_the_trainer_learns_and_ends_with_the_run(rollouts) -> None:
    async with opened(max_staleness=3, pool=2.0) as schedule:
        rollouts.end(*range(12))
        for step in range(6):
            await taken(schedule, step)
            await asyncio.sleep(0)
            assert len(rollouts.begun) == min(2 * step + 6, 12)
            await schedule.serve(serves(f"v{step + 1}"))
        assert schedule.cursor() == Cursor(12, ())


async def test_a_resumed_pool_begins_no_task_twice_and_loses_none(rollouts) -> None:
    async with opened(max_staleness=2, pool=2.0) as schedule:
        rollouts.end(1, 2)
        first = await taken(schedule, 0)
        await schedule.serve(serves("v1"))
        await asyncio.sleep(0)
        kept = schedule.cursor()
    assert kept == Cursor(6, ((0, 0), (3, 0), (4, 0), (5, 0)))
    assert rollouts.cancelled == [f"{p // 2:05d}/{ORDER[p]}" for p in (0, 3, 4, 5)]
    rollouts.begun.clear()
    rollouts.end(*range(12))
    async with opened(max_staleness=2, pool=2.0, cursor=kept, names=("v0", "v1")) as schedule:
        assert schedule.cursor() == kept
        rest = []
        for step in range(1, 6):
            rest += await taken(schedule, step)
            await schedule.serve(serves(f"v{step + 1}"))
    assert sorted(first + rest) == sorted(ORDER)
    assert len(rollouts.begun) == 10


async def test_groups_that_the_filter_refuses_are_replaced_by_the_next_ones(rollouts) -> None:
    rollouts.verdicts = lambda task: ("solved", "solved" if task == ORDER[0] else "unsolved")
    rollouts.end(*range(12))
    chosen = {"group_filter": "mixed-verdicts"}
    async with opened(max_staleness=0, rollout=chosen) as schedule:
        groups = await schedule.take(0)
        assert [one.task_id for one in groups.kept] == [ORDER[1], ORDER[2]]
        assert [one.task_id for one in groups.left_out] == [ORDER[0]]


async def test_if_no_group_passes_the_step_ends_and_trains_without_advantage(rollouts) -> None:
    rollouts.verdicts = lambda task: ("unsolved", "unsolved")
    rollouts.end(*range(12))
    told: list[Event] = []
    chosen = {"group_filter": "mixed-verdicts", "refill_rounds": 1}
    async with opened(told, max_staleness=1, rollout=chosen) as schedule:
        async with asyncio.timeout(30):
            groups = await schedule.take(0)
        assert [one.task_id for one in groups.kept] == ORDER[:2]
        assert len(groups.left_out) >= 2
    assert Notice("0 of 2 groups pass rollout.group_filter") in told


async def test_a_failed_rollout_stops_the_loop_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run_one(task, stage, parts, **_) -> Group:
        message = "the disk is full"
        raise RunError(message)

    monkeypatch.setattr(group, "run_one", run_one)
    with pytest.raises(RunError, match="the disk is full"):
        async with opened() as schedule:
            await taken(schedule, 0)


async def test_a_lost_episode_is_retried_alone_while_others_continue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[str] = []
    second_try = asyncio.Event()

    async def run(task: Task, name: str, parts: Parts, **_: object) -> Episode:
        """A fake of `episode.run`: the first attempt of the first Task is lost."""
        tried.append(name)
        is_lost = name == f"00000/{ORDER[0]}.0"
        if name == f"00000/{ORDER[0]}.0+1":
            await second_try.wait()
        verdict = Verdict.INFRA if is_lost else Verdict.SOLVED
        parts.emit(EpisodeEnded(name, task.id, verdict, 0.0, 0, 0, 0.0))
        return made.episode(name.partition("+")[0], verdict=verdict)

    monkeypatch.setattr(group.episode, "run", run)
    async with opened(max_staleness=2, pool=2.0, folder=tmp_path) as schedule:
        assert await taken(schedule, 0) == [ORDER[1], ORDER[2]]
        second_try.set()
        await schedule.serve(serves("v1"))
        assert (await taken(schedule, 1))[0] == ORDER[0]
    assert tried.count(f"00000/{ORDER[0]}.0+1") == 1
    assert [name for name in tried if "+" in name] == [f"00000/{ORDER[0]}.0+1"]
    assert tried.count(f"00000/{ORDER[0]}.1") == 1
