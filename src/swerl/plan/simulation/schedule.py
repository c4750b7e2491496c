"""Simulate the schedule of a run: synchronous, one step off, or asynchronous.

Colocated engines and trainer take turns; the other two modes need separate GPUs for each.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import TypeAlias

from swerl.plan.simulation.engine import (
    Process,
    Signal,
    SimulatedClock,
    SimulatedSlots,
    SimulatedUsage,
    all_of,
)
from swerl.plan.simulation.episodes import EpisodeRunner, EpisodeTrace, LoadSource
from swerl.plan.simulation.machine import SimulatedMachine
from swerl.recipe.schema import RolloutSection, ScheduleSection


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step; times in seconds."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by cause of waiting; for a rollout, the activities of the Episode that ended last."""
    rollout_s: float
    train_s: float
    tail_s: float
    """From the end of nine in ten Episodes to the end of the last."""
    episodes: int
    row_tokens: int
    """Tokens of the Episodes' rows, prompts included."""
    sandbox_s: float
    """Sandbox-seconds of all Episodes."""
    engine_s: float
    """Seconds of all Episodes' requests."""
    timed_out: int
    """Episodes that the agent's budget ended."""
    staleness: float
    """Mean number of weight versions between an Episode's start and its training."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    mode: str
    steps: tuple[SimulatedStep, ...]
    usage: tuple[SimulatedUsage, ...]
    """Of each engine."""
    turn_times: tuple[float, ...]
    seconds: float
    """From start to end."""

    @property
    def step_s(self) -> float:
        """Mean seconds per step, including the start of a pipeline."""
        return self.seconds / len(self.steps)

    def hours(self, num_steps: int) -> float:
        """Return the hours of `num_steps` such steps, without evaluations."""
        return num_steps * self.step_s / 3600

    @property
    def parts(self) -> Mapping[str, float]:
        """Fraction of the time by cause of waiting, largest first."""
        total: Counter[str] = Counter()
        for step in self.steps:
            total.update(step.parts)
        whole = sum(total.values())
        return {name: seconds / whole for name, seconds in total.most_common()}

    @property
    def bottleneck(self) -> str:
        """The largest cause of waiting."""
        return next(iter(self.parts))

    @property
    def engine_busy(self) -> float:
        """Fraction of the time in which an engine reads or replies."""
        busy = sum(each.prompt_s + each.reply_s for each in self.usage)
        return busy / (len(self.usage) * self.seconds)

    @property
    def trainer_busy(self) -> float:
        """Fraction of the time in which the trainer trains."""
        return sum(step.train_s for step in self.steps) / self.seconds

    @property
    def replies_at_once(self) -> float:
        """Mean number of concurrent replies in an engine while there are any."""
        rounds = sum(each.reply_rounds for each in self.usage)
        return sum(each.sampled for each in self.usage) / max(rounds, 1e-9)

    @property
    def tokens_again(self) -> float:
        """Fraction of computed prompt tokens that had been evicted from a cache."""
        read = sum(each.read for each in self.usage)
        return sum(each.again for each in self.usage) / max(read, 1)

    @property
    def sandbox_s(self) -> float:
        """Sandbox-seconds per Episode, both sandboxes together."""
        return self._sum("sandbox_s") / self._sum("episodes")

    @property
    def engine_s(self) -> float:
        """Seconds of requests per Episode."""
        return self._sum("engine_s") / self._sum("episodes")

    @property
    def tail_share(self) -> float:
        """Fraction of the time in which fewer than one in ten Episodes run."""
        return self._sum("tail_s") / self.seconds

    @property
    def timed_out(self) -> float:
        """Fraction of Episodes that the agent's budget ended."""
        return self._sum("timed_out") / self._sum("episodes")

    @property
    def row_tokens(self) -> float:
        return self._sum("row_tokens") / self._sum("episodes")

    def mean(self, name: str) -> float:
        """Return the mean of a field over the steps."""
        return self._sum(name) / len(self.steps)

    def turns_per_s(self, window_s: float = 10.0) -> tuple[float, float]:
        """Return the gateway's turns per second: mean, and in the busiest window."""
        times, most, first = sorted(self.turn_times), 0, 0
        for last, time in enumerate(times):
            while times[first] <= time - window_s:
                first += 1
            most = max(most, last - first + 1)
        return len(times) / self.seconds, most / window_s

    def _sum(self, name: str) -> float:
        return float(sum(getattr(step, name) for step in self.steps))


def tail(ended: Sequence[float]) -> float:
    """Return the seconds from the end of nine in ten Episodes to the end of the last."""
    times = sorted(ended)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return sum(gaps[-(-9 * len(times) // 10) - 1 :]) if gaps else 0.0


Training: TypeAlias = Generator[float | Signal, None, float]
MODES = ("sync", "one-step-off", "async")


@dataclass(slots=True)
class _SimulatedGroup:
    """Episodes of one Task."""

    traces: list[EpisodeTrace]
    version: int
    """Weight version at its start."""
    passes: bool
    done: Signal = field(default_factory=Signal)


@dataclass(slots=True)
class ScheduleSimulation:
    """Simulates a run of some steps."""

    machine: SimulatedMachine
    rollout: RolloutSection
    source: LoadSource
    agent_s: float
    passing_share: float = 1.0
    """Fraction of Groups that a filter passes."""
    section: ScheduleSection = field(default_factory=ScheduleSection)
    seed: int = 0
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    _runner: EpisodeRunner = field(init=False)
    _chance: random.Random = field(init=False)
    _steps: list[SimulatedStep] = field(default_factory=list)
    _version: int = 0

    def __post_init__(self) -> None:
        slots = SimulatedSlots(self.rollout.concurrency)
        self._runner = EpisodeRunner(self.clock, self.machine, slots, self.agent_s)
        self._chance = random.Random(self.seed)

    def run(self, mode: str, num_steps: int) -> SimulatedRun:
        """Simulate a run; a ScheduleSimulation can be used once."""
        modes = {"sync": self._sync, "one-step-off": self._one_step_off, "async": self._async}
        self.clock.run(until=self.clock.start(modes[mode](num_steps)))
        return SimulatedRun(
            mode=mode,
            steps=tuple(self._steps),
            usage=tuple(engine.usage for engine in self._runner.engines),
            turn_times=tuple(self._runner.turn_times),
            seconds=self.clock.now,
        )

    def _sync(self, num_steps: int) -> Process:
        for _ in range(num_steps):
            began, groups = self.clock.now, list[_SimulatedGroup]()
            yield from self._rollout(groups)
            rolled = self.clock.now - began
            yield self.machine.switch_s
            train_s = yield from self._train(self._kept(groups))
            yield from self._publish()
            parts = (
                _slowest(groups, rolled)
                | self._update
                | {
                    "training": train_s,
                    "switching": self.machine.switch_s,
                    "the step's own work": self.machine.step_s,
                }
            )
            self._record(groups, began, rolled, train_s, parts)

    def _one_step_off(self, num_steps: int) -> Process:
        """Roll out the next step while this one is trained; the first rollout runs alone."""
        began, groups = self.clock.now, list[_SimulatedGroup]()
        yield from self._rollout(groups)
        alone = _slowest(groups, self.clock.now - began)
        for number in range(num_steps):
            started, coming = self.clock.now, list[_SimulatedGroup]()
            train_s, training = 0.0, self._train(self._kept(groups))

            def trained(training: Training = training) -> Process:
                nonlocal train_s
                train_s = yield from training

            under_way = [self.clock.start(trained())]
            if number < num_steps - 1:
                under_way.append(self.clock.start(self._rollout(coming)))
            yield from all_of(under_way)
            rolled = _last_end(coming, started) - started
            parts = {"training": train_s, "the step's own work": self.machine.step_s}
            if rolled > train_s + self.machine.step_s:
                parts = _slowest(coming, rolled)
            yield from self._publish()
            parts = _together(alone, parts, self._update)
            self._record(groups, began, rolled, train_s, parts)
            began, groups, alone = self.clock.now, coming, {}

    def _async(self, num_steps: int) -> Process:
        """Keep Groups running; train the oldest finished ones as soon as there are enough.

        A step waits for Groups that would be too stale for the next one.
        """
        pool: list[_SimulatedGroup] = []
        for _ in range(num_steps):
            began = self.clock.now
            self._fill(pool)
            while not (taken := self._ready(pool)):
                yield _first([g.done for g in pool if not g.done.happened])
                pool = [g for g in pool if g.passes or not g.done.happened]
                self._fill(pool)
            waited = self.clock.now - began
            pool = [group for group in pool if group not in taken]
            train_s = yield from self._train(taken)
            yield from self._publish()
            parts = (
                _in_proportion(taken, waited)
                | self._update
                | {"training": train_s, "the step's own work": self.machine.step_s}
            )
            self._record(taken, began, waited, train_s, parts)

    def _fill(self, pool: list[_SimulatedGroup]) -> None:
        """Start Groups up to the pool's size."""
        more = self.section.pool if self.section.max_staleness else 1.0
        while len(pool) < ceil(more * self.rollout.groups_per_step):
            pool.append(self._begin())

    def _ready(self, pool: Sequence[_SimulatedGroup]) -> list[_SimulatedGroup]:
        """Return the Groups of the next step; empty if they are not finished."""
        oldest = self._version - self.section.max_staleness
        if any(g.version <= oldest and not g.done.happened for g in pool):
            return []
        wanted = self.rollout.groups_per_step
        done = [group for group in pool if group.done.happened and group.passes][:wanted]
        return done if len(done) == wanted else []

    def _rollout(self, groups: list[_SimulatedGroup]) -> Process:
        """Run a step's Groups, and replacements for those that the filter rejects."""
        wanted, more = self.rollout.groups_per_step, self.rollout.oversample
        for _ in range(1 + self.rollout.refill_rounds):
            missing = wanted - sum(group.passes for group in groups)
            if missing <= 0:
                return
            begun = [self._begin() for _ in range(ceil(missing * more))]
            groups += begun
            yield from all_of([group.done for group in begun])

    def _begin(self) -> _SimulatedGroup:
        size = self.rollout.episodes_per_group
        traces = [self._runner.begin(self.source.draw(self._chance)) for _ in range(size)]
        filtered = self.rollout.group_filter != "none"
        passes = not filtered or self._chance.random() < self.passing_share
        group = _SimulatedGroup(traces, self._version, passes)
        self.clock.start(all_of([trace.ended for trace in traces])).then(group.done.fire)
        return group

    def _publish(self) -> Iterator[float]:
        for engine in self._runner.engines:
            engine.pause()
        yield self.machine.update_s
        self._version += 1
        for engine in self._runner.engines:
            engine.resume()

    @property
    def _update(self) -> dict[str, float]:
        return {"weight update": self.machine.update_s}

    def _kept(self, groups: Sequence[_SimulatedGroup]) -> list[_SimulatedGroup]:
        return [group for group in groups if group.passes][: self.rollout.groups_per_step]

    def _train(self, groups: Sequence[_SimulatedGroup]) -> Training:
        """Train on Groups and finish the step; return the seconds of the training."""
        rows = [length for g in groups for trace in g.traces for length in trace.rows]
        began, machine = self.clock.now, self.machine
        if machine.trainer_cores:
            yield from self._runner.cores.work(machine.train_s(rows), machine.trainer_cores)
        else:
            yield machine.train_s(rows)
        train_s = self.clock.now - began
        yield machine.step_s
        return train_s

    def _record(
        self,
        groups: Sequence[_SimulatedGroup],
        began: float,
        rolled: float,
        train_s: float,
        parts: Mapping[str, float],
    ) -> None:
        traces = [trace for group in groups for trace in group.traces]
        self._steps.append(
            SimulatedStep(
                seconds=self.clock.now - began,
                parts=parts,
                rollout_s=rolled,
                train_s=train_s,
                tail_s=tail([trace.ended_at for trace in traces]),
                episodes=len(traces),
                row_tokens=sum(length for trace in traces for length in trace.rows),
                sandbox_s=sum(trace.sandbox_s for trace in traces),
                engine_s=sum(trace.engine_s for trace in traces),
                timed_out=sum(trace.timed_out for trace in traces),
                staleness=sum(self._version - 1 - g.version for g in groups) / max(len(groups), 1),
            )
        )


def _slowest(groups: Sequence[_SimulatedGroup], seconds: float) -> dict[str, float]:
    """Return the activities of the Episode that ended last; earlier rounds are one entry."""
    last = max((t for group in groups for t in group.traces), key=lambda trace: trace.ended_at)
    parts = dict(last.parts)
    earlier = seconds - sum(parts.values())
    return parts | ({"earlier rounds": earlier} if earlier > 1e-6 else {})


def _last_end(groups: Sequence[_SimulatedGroup], began: float) -> float:
    return max((t.ended_at for group in groups for t in group.traces), default=began)


def _in_proportion(groups: Sequence[_SimulatedGroup], seconds: float) -> dict[str, float]:
    """Divide a waiting time by the activities of its Episodes."""
    total = _together(*(trace.parts for group in groups for trace in group.traces))
    whole = sum(total.values()) or 1.0
    return {name: seconds * part / whole for name, part in total.items()}


def _together(*parts: Mapping[str, float]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for each in parts:
        for name, seconds in each.items():
            total[name] += seconds
    return dict(total)


def _first(signals: Sequence[Signal]) -> Signal:
    """Return a Signal that fires with the first of these."""
    first = Signal()
    for signal in signals:
        signal.then(first.fire)
    return first
