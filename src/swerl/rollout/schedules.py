"""Schedules: when Groups are rolled out and when new weights are loaded, by `schedule.mode`.

The training loop takes the Groups of a step from a Schedule and hands it the trainer's weights.
`sync` alternates rollouts and optimizer steps, and `async` keeps a pool of Groups running all the
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from swerl.core.episode import Group
from swerl.core.events import Notice, StepStarted
from swerl.core.task import Task
from swerl.recipe.schema import ScheduleSection
from swerl.rollout import group, step
from swerl.rollout.parts import Parts
from swerl.rollout.step import StepGroups
from swerl.rollout.versions import Versions
from swerl.runs.layout import Cursor, RunFolder

Transfer: TypeAlias = Callable[[], Awaitable[str]]
"""Loads the trainer's weights into the engine and returns the version that then serves."""


@dataclass(frozen=True, slots=True)
class ScheduleInputs:
    """Everything that a Schedule works with."""

    tasks: Sequence[Task]
    parts: Parts
    folder: RunFolder
    section: ScheduleSection
    steps: int
    """Steps of the whole run."""
    versions: Versions
    """Every version that has served; a Schedule adds those that it loads."""


class Schedule(Protocol):
    """Decides when to roll out and when to load weights."""

    async def take(self, number: int) -> StepGroups:
        """Return the Groups that a step trains; the newest weights serve when it returns."""

    async def serve(self, transfer: Transfer) -> None:
        """Load new weights, at once or as soon as the schedule allows it."""

    async def settle(self) -> None:
        """Before an evaluation: load the newest weights, and none until it is over."""

    def cursor(self) -> Cursor:
        """Return the position in the order of Tasks, to be committed with the last step."""


@asynccontextmanager
async def open_schedule(inputs: ScheduleInputs, cursor: Cursor) -> AsyncIterator[Schedule]:
    """Open the recipe's schedule at the position that the last committed step stored.

    An error in a background rollout cancels the block; leaving the block cancels the rollouts.
    """
    if inputs.section.mode == "sync":
        yield Sync(inputs)
        return
    try:
        async with asyncio.TaskGroup() as running:
            schedule = AsyncPool(inputs, running, cursor)
            try:
                yield schedule
            finally:
                schedule.stop()
    except BaseExceptionGroup as errors:
        # A TaskGroup wraps every error; callers expect the error itself.
        raise _first_error(errors) from errors


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Sync:
    """Implements Schedule: the weights that a step trains sampled all of its tokens."""

    def __init__(self, inputs: ScheduleInputs) -> None:
        self._inputs = inputs

    async def take(self, number: int) -> StepGroups:
        inputs = self._inputs
        return await step.run_step(inputs.tasks, number, inputs.parts, inputs.folder)

    async def serve(self, transfer: Transfer) -> None:
        self._inputs.versions.add(await transfer())

    async def settle(self) -> None:
        """Nothing to do: the newest weights serve already."""

    def cursor(self) -> Cursor:
        """Return an empty one: the step number decides which Tasks come next."""
        return Cursor()


class QueuedGroup(Protocol):
    """A Group in the queue of the pool."""

    @property
    def began(self) -> int:
        """Number of the version that served when the Group started."""

    @property
    def is_finished(self) -> bool:
        """True when all Episodes have ended."""


QueuedT = TypeVar("QueuedT", bound=QueuedGroup)


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Limits of the queue.

    Groups are queued in the order in which they start. A step takes the oldest finished ones, so
    later Groups overtake a slow one, but only as long as everything left behind can still be
    trained in time. A Group that started under version b may be trained up to version
    b + `staleness`; trained in the order of the queue, the one at position p is trained
    p // `groups` steps after the next. Every Group that starts is trained, however slow it is:
    short Episodes come earlier, never more often.
    """

    groups: int
    """Groups that a step trains."""
    staleness: int
    """Maximum number of versions between a Group's start and its training."""
    pool: int
    """Maximum number of Groups in the queue."""


def may_start(num_queued: int, bounds: QueueBounds, *, served: int, trained_next: int) -> bool:
    """Return whether one more Group may start under version `served`.

    `trained_next` is the version that the trainer holds at the next step that takes Groups.
    """
    # `groups` Groups leave the queue in each step, and each step adds one version.
    trained_at = trained_next + num_queued // bounds.groups
    return num_queued < bounds.pool and trained_at <= served + bounds.staleness


def choose_groups(
    queue: Sequence[QueuedT], bounds: QueueBounds, *, version: int, count: int
) -> list[QueuedT] | None:
    """Return the oldest `count` finished Groups for a step that trains `version`.

    None if there are too few, or if a Group left behind would become too old.
    """
    finished = [item for item in queue if item.is_finished][:count]
    if len(finished) < count:
        return None
    chosen = {id(item) for item in finished}
    remaining = [item for item in queue if id(item) not in chosen]
    # The next step trains version + 1, and takes `groups` of the remaining ones.
    in_time = all(
        version + 1 + position // bounds.groups <= item.began + bounds.staleness
        for position, item in enumerate(remaining)
    )
    return finished if in_time else None


@dataclass(frozen=True, slots=True)
class _PoolGroup:
    """A Group that runs, or that is finished and not trained."""

    position: int
    """Position in the order of Tasks; it names the Group."""
    began: int
    task: Task
    stage: str
    work: asyncio.Task[Group]

    @property
    def is_finished(self) -> bool:
        return self.work.done()


class AsyncPool:
    """Implements Schedule: Groups run all the time, and each step trains finished ones.

    Tasks start in the order of `sync`, epoch by epoch.
    """

    def __init__(self, inputs: ScheduleInputs, running: asyncio.TaskGroup, cursor: Cursor) -> None:
        rollout, section = inputs.parts.rollout, inputs.section
        self._bounds = QueueBounds(
            groups=rollout.groups_per_step,
            staleness=section.max_staleness,
            pool=round(section.pool * rollout.groups_per_step),
        )
        self._inputs = inputs
        self._parts = inputs.parts
        self._passes = step.group_filter(rollout.group_filter)
        self._running = running
        self._queue: list[_PoolGroup] = []
        self._next = cursor.next_place
        self._resumed = list(cursor.under_way)
        self._is_training = False
        self._needed = 0
        """Groups that the remaining steps can train."""

    async def take(self, number: int) -> StepGroups:
        """Wait for the step's Groups; the others keep running."""
        self._is_training = False
        self._needed = (self._inputs.steps - number) * self._bounds.groups
        rollout = self._parts.rollout
        episodes = self._bounds.groups * rollout.episodes_per_group
        self._parts.emit(StepStarted(number, episodes))
        left_out: list[Group] = []
        # Each pass filters the queue; `None` means that the step needs one more finished Group.
        while (chosen := self._choose(left_out)) is None:
            pending = [item.work for item in self._queue if not item.is_finished]
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        groups = [self._remove(item) for item in chosen]
        size = self._bounds.groups
        if len(groups) < size:
            text = f"{len(groups)} of {size} groups pass rollout.group_filter"
            self._parts.emit(Notice(text))
        if not groups:  # All advantages are 0: the step changes little, and the run continues.
            groups, left_out = left_out[:size], left_out[size:]
        step.check_losses([*groups, *left_out])
        # From here to `serve`, the trainer makes a version newer than the one that serves.
        self._is_training = True
        self._needed -= size
        self._fill()
        return StepGroups(tuple(groups), tuple(left_out))

    async def serve(self, transfer: Transfer) -> None:
        """Load at once; running Episodes continue on the new weights."""
        self._inputs.versions.add(await transfer())
        self._is_training = False
        self._fill()

    async def settle(self) -> None:
        """Nothing to do: the newest weights serve, and none are loaded between two steps."""

    def cursor(self) -> Cursor:
        """Return the next position, and the Groups that have started and are not trained."""
        under_way = [(item.position, item.began) for item in self._queue]
        # Resumed Groups that have not started again keep their place in the next cursor.
        return Cursor(self._next, (*under_way, *self._resumed))

    def stop(self) -> None:
        """Cancel the running Groups."""
        for item in self._queue:
            item.work.cancel()

    def _choose(self, left_out: list[Group]) -> list[_PoolGroup] | None:
        """Filter and refill the queue; return the step's Groups once they are finished."""
        finished = [item for item in self._queue if item.is_finished]
        left_out += [
            self._remove(item) for item in finished if not self._passes(item.work.result())
        ]
        # The bound prevents endless refills under a filter that rejects every Group.
        rounds = 1 + self._parts.rollout.refill_rounds
        may_refill = len(left_out) < rounds * self._bounds.groups
        if may_refill:
            self._fill()
        # Without refills, the step takes the finished Groups, even if they are too few.
        candidates = self._queue if may_refill else [q for q in self._queue if q.is_finished]
        size = min(self._bounds.groups, len(candidates))
        # A step waits for slow Groups before they become too old.
        version = self._inputs.versions.newest
        return choose_groups(self._queue, self._bounds, version=version, count=size)

    def _fill(self) -> None:
        """Start as many Groups as the bounds allow, those of an interrupted run first."""
        newest = self._inputs.versions.newest
        trained_next = newest + self._is_training
        # They keep the position and the version under which they began.
        while self._resumed:
            self._start(*self._resumed.pop(0))
        # The last steps start no Groups that no step would train.
        while len(self._queue) < self._needed and may_start(
            len(self._queue), self._bounds, served=newest, trained_next=trained_next
        ):
            self._start(self._next, newest)
            self._next += 1

    def _start(self, position: int, began: int) -> None:
        # The Task is the one that a synchronous run would train in step `number`.
        number, index = divmod(position, self._bounds.groups)
        groups, seed = self._bounds.groups, self._parts.seed
        tasks = step.choose_tasks(self._inputs.tasks, number, groups, seed)
        task, stage = tasks[index], f"{number:05d}"
        size, folder = self._parts.rollout.episodes_per_group, self._inputs.folder
        work = group.run_one(task, stage, self._parts, size=size, folder=folder)
        running = self._running.create_task(work)
        self._queue.append(_PoolGroup(position, began, task, stage, running))

    def _remove(self, group: _PoolGroup) -> Group:
        self._queue.remove(group)
        return group.work.result()
