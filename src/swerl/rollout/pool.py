"""`schedule.mode = "async"`: a standing pool of Groups, from which the trainer takes finished ones.

Tasks begin in the same order as in the other modes, epoch by epoch; a Group's place in that order
is its name. `queue.py` says when one may begin and which are trained next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swerl.core.episode import Group
from swerl.core.events import Event, Notice, StepStarted, TurnEnded, fan_out
from swerl.core.task import Task
from swerl.rollout import group, queue
from swerl.rollout.filters import group_filter
from swerl.rollout.queue import Bounds
from swerl.rollout.scheduler import Stale, StepGroups, choose, refuse_losses
from swerl.rollout.supply import Site, Transfer
from swerl.runs.layout import Cursor


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A Group in the queue."""

    place: int
    began: int
    """Place of the version that served when it began."""
    task: Task
    stage: str
    work: asyncio.Task[Group]

    @property
    def is_finished(self) -> bool:
        return self.work.done()


class Pool:
    """Implements Supply."""

    def __init__(self, site: Site, running: asyncio.TaskGroup, cursor: Cursor) -> None:
        rollout, schedule = site.parts.rollout, site.schedule
        self._bounds = Bounds(
            groups=rollout.groups_per_step,
            staleness=schedule.max_staleness,
            pool=round(schedule.pool * rollout.groups_per_step),
        )
        self._site = site
        self._sampled = _Sampled()
        self._parts = replace(site.parts, emit=fan_out(site.parts.emit, self._sampled))
        self._passes = group_filter(rollout.group_filter)
        self._running = running
        self._queue: list[_UnderWay] = []
        self._next = cursor.next_place
        self._resumed = list(cursor.under_way)
        self._is_training = False
        self._needed = 0
        """Groups that the steps to come can train."""

    async def take(self, step: int) -> StepGroups:
        """Wait for the step's Groups; the pool goes on with the others meanwhile and afterwards."""
        self._is_training = False
        self._needed = (self._site.steps - step) * self._bounds.groups
        rollout = self._parts.rollout
        episodes = self._bounds.groups * rollout.episodes_per_group
        self._site.parts.emit(StepStarted(step, episodes))
        left_out: list[Group] = []
        stale: list[Stale] = []
        while (chosen := self._choose(left_out, stale)) is None:
            waited = [each.work for each in self._queue if not each.is_finished]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        kept = [self._remove(each) for each in chosen]
        if len(kept) < self._bounds.groups:
            self._tell_missing(len(kept))
        if not kept:  # advantages of 0: the step changes little, and the run goes on
            kept, left_out = left_out[: self._bounds.groups], left_out[self._bounds.groups :]
        refuse_losses([*kept, *left_out], rollout.max_infra_rate)
        self._is_training = True
        self._needed -= self._bounds.groups
        self._fill()
        return StepGroups(tuple(kept), tuple(left_out), tuple(stale))

    async def serve(self, transfer: Transfer) -> None:
        """Load at once, while the pool is at work; what becomes of replies is the gate's rule."""
        if gate := self._site.gate:
            async with gate.shut():
                self._site.versions.add(await transfer())
        else:
            self._site.versions.add(await transfer())
        self._is_training = False
        self._fill()

    async def settle(self) -> None:
        """Do nothing: the newest weights serve, and no others are loaded between two steps."""

    def cursor(self) -> Cursor:
        """Return which Groups have begun and are not trained."""
        under_way = [(each.place, each.began) for each in self._queue]
        return Cursor(self._next, (*under_way, *self._resumed))

    def stop(self) -> None:
        """Give up what is under way."""
        for each in self._queue:
            each.work.cancel()

    def _choose(self, left_out: list[Group], stale: list[Stale]) -> list[_UnderWay] | None:
        """Return the step's Groups if they are there, after bringing the queue up to date."""
        if self._site.schedule.too_stale == "drop":
            stale += [self._drop(each) for each in self._overdue()]
        finished = [each for each in self._queue if each.is_finished]
        left_out += [
            self._remove(each) for each in finished if not self._passes(each.work.result())
        ]
        rounds = 1 + self._parts.rollout.refill_rounds
        may_refill = len(left_out) < rounds * self._bounds.groups
        if may_refill:
            self._fill()
        done = [each for each in self._queue if each.is_finished]
        wanted = min(self._bounds.groups, len(self._queue if may_refill else done))
        if self._site.schedule.too_stale == "drop":
            return done[:wanted] if len(done) >= wanted else None
        version = self._site.versions.newest
        return queue.choose(self._queue, self._bounds, version=version, wanted=wanted)

    def _fill(self) -> None:
        """Begin as many Groups as the bounds allow."""
        newest = self._site.versions.newest
        trained_next = newest + self._is_training
        while self._resumed:
            place, began = self._resumed.pop(0)
            self._begin(place, began)
        while len(self._queue) < self._needed and queue.may_begin(
            len(self._queue), self._bounds, served=newest, trained_next=trained_next
        ):
            self._begin(self._next, newest)
            self._next += 1

    def _begin(self, place: int, began: int) -> None:
        turn, index = divmod(place, self._bounds.groups)
        task, stage = self._turn(turn)[index], f"{turn:05d}"
        work = group.run_one(
            task,
            stage,
            self._parts,
            size=self._parts.rollout.episodes_per_group,
            folder=self._site.folder,
        )
        running = self._running.create_task(work)
        self._queue.append(_UnderWay(place, began, task, stage, running))

    def _turn(self, turn: int) -> Sequence[Task]:
        """Return the Tasks of which a synchronous run would make this step."""
        easy_first = self._parts.rollout.order == "easy-first"
        return choose(
            self._site.tasks, turn, self._bounds.groups, self._parts.seed, easy_first=easy_first
        )

    def _remove(self, each: _UnderWay) -> Group:
        self._queue.remove(each)
        self._sampled.forget(group.prefix_of(each.task, each.stage))
        return each.work.result()

    def _overdue(self) -> list[_UnderWay]:
        version = self._site.versions.newest
        return queue.overdue(self._queue, self._bounds, version=version)

    def _drop(self, each: _UnderWay) -> Stale:
        self._queue.remove(each)
        each.work.cancel()
        lengths = self._sampled.forget(group.prefix_of(each.task, each.stage))
        return Stale(each.task.id, each.stage, lengths)

    def _tell_missing(self, num_kept: int) -> None:
        wanted = self._bounds.groups
        self._site.parts.emit(Notice(f"{num_kept} of {wanted} groups pass rollout.group_filter"))


class _Sampled:
    """Counts the tokens of Episodes while they are sampled."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TurnEnded):
            self._tokens[event.episode] += event.output_tokens

    def forget(self, prefix: str) -> tuple[int, ...]:
        """Return the tokens of each Episode whose id begins so, and count them no more."""
        names = [name for name in self._tokens if name.startswith(prefix)]
        return tuple(self._tokens.pop(name) for name in names)
