"""Simulated Episodes: their load, drawn or recorded, and their way through slots and engines."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from swerl.core.errors import InputError
from swerl.plan.simulation.engine import (
    Process,
    Signal,
    SimulatedClock,
    SimulatedCores,
    SimulatedEngine,
    SimulatedSlots,
)
from swerl.plan.simulation.machine import SimulatedMachine
from swerl.runs.history import read_events


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """One request, and the tools before the next one."""

    prompt_tokens: int
    """The whole prompt; cached tokens cost nothing."""
    output_tokens: int
    tool_s: float
    """Seconds of tools after the reply."""


@dataclass(frozen=True, slots=True)
class EpisodeLoad:
    turns: tuple[TurnLoad, ...]
    boot_s: float
    """Seconds of sandbox start and installation."""
    grading_s: float
    """Seconds of diff, fresh sandbox and tests."""
    lost: tuple[int, ...] = ()
    """Turns of each earlier attempt that infrastructure lost."""
    engine_s: float = 0.0
    """Seconds of its requests, if they were recorded."""

    @property
    def sandbox_s(self) -> float:
        """Seconds in which its sandboxes work."""
        return self.boot_s + self.grading_s + sum(turn.tool_s for turn in self.turns)

    def scaled(self, times: float) -> EpisodeLoad:
        """Return it with other seconds of its sandboxes."""
        return replace(
            self,
            turns=tuple(replace(turn, tool_s=turn.tool_s * times) for turn in self.turns),
            boot_s=self.boot_s * times,
            grading_s=self.grading_s * times,
        )

    def rows(self) -> Iterator[int]:
        """Yield the lengths of its training rows; a prompt shorter than the history starts one."""
        length = 0
        for turn in self.turns:
            if turn.prompt_tokens < length:
                yield length
            length = turn.prompt_tokens + turn.output_tokens
        if length:
            yield length


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """LoadLimits that end an Episode early."""

    max_turns: int
    max_new_tokens: int
    max_context_tokens: int
    tool_s: float
    grading_s: float


class DrawnLoads:
    """Episodes drawn from log-normal distributions, given by medians and spreads."""

    def __init__(self, value: Mapping[str, float], limits: LoadLimits, *, refills: int = 0) -> None:
        self._value = value
        self._limits = limits
        self._refills = refills

    def draw(self, chance: random.Random) -> EpisodeLoad:
        """Return one Episode; a full context ends it, as in the gateway."""
        turns = tuple(self._turns(chance))
        return EpisodeLoad(
            turns=turns,
            boot_s=self._sample(chance, "boot_s"),
            grading_s=min(self._sample(chance, "grading_s"), self._limits.grading_s),
            lost=tuple(self._lost(chance, len(turns))),
        )

    def _turns(self, chance: random.Random) -> Iterator[TurnLoad]:
        limits = self._limits
        num = max(1, round(self._sample(chance, "turns")))
        length = int(self._value["first_prompt"])
        for _ in range(min(num, limits.max_turns)):
            room = limits.max_context_tokens - length
            if room <= 0:
                return
            reply = max(1, round(self._sample(chance, "reply_tokens")))
            reply = min(reply, limits.max_new_tokens, room)
            tool_s = min(self._sample(chance, "tool_s"), limits.tool_s)
            yield TurnLoad(length, reply, tool_s)
            length += reply + round(self._sample(chance, "result_tokens"))

    def _lost(self, chance: random.Random, num_turns: int) -> Iterator[int]:
        """Yield the turns of lost attempts; each is lost at a random turn."""
        for _ in range(self._refills):
            if chance.random() >= self._value["lost_share"]:
                return
            yield chance.randrange(num_turns)

    def _sample(self, chance: random.Random, key: str) -> float:
        median, spread = self._value[f"{key}.median"], self._value[f"{key}.spread"]
        if not median:
            return 0.0
        return chance.lognormvariate(math.log(median), spread)


class RecordedLoads:
    """Episodes of a real run, drawn with replacement; `times` multiplies the sandboxes' seconds."""

    def __init__(self, episodes: tuple[EpisodeLoad, ...], times: float = 1.0) -> None:
        self._episodes = tuple(load.scaled(times) for load in episodes)

    def draw(self, chance: random.Random) -> EpisodeLoad:
        return chance.choice(self._episodes)


_BEFORE = ("boot",)
_AGENT = "agent"
_INSIDE = ("hide_future", "test")
"""Phases that are a part of another."""


@dataclass(slots=True)
class _RecordedEpisode:
    turns: list[tuple[float, float, int, int]] = field(default_factory=list)
    """(end time, seconds, prompt tokens, output tokens)."""
    phases: dict[str, float] = field(default_factory=dict)


def read_recorded(run: Path, *, prefixes: tuple[str, ...] = ("",)) -> tuple[EpisodeLoad, ...]:
    """Return the finished Episodes of a run whose names begin with one of the prefixes.

    Raises InputError if there are none.
    """
    path = run / "events.jsonl"
    if not path.is_file():
        raise InputError(
            f"{run} is not a run folder: it has no events.jsonl",
            hint="name a folder under runs/ whose run has finished episodes",
        )
    drafts: dict[str, _RecordedEpisode] = {}
    found = []
    for event in read_events(path):
        if not event.get("episode", "").startswith(prefixes):
            continue
        draft = drafts.setdefault(event.get("episode", ""), _RecordedEpisode())
        match event["event"]:
            case "TurnEnded":
                draft.turns.append(_turn(event))
            case "PhaseEnded":
                phase = event["phase"]
                draft.phases[phase] = draft.phases.get(phase, 0.0) + event["seconds"]
            case "EpisodeEnded" if draft.turns:
                found.append(_load(drafts.pop(event["episode"])))
    if not found:
        raise InputError(
            f"{path} has no finished episode with turns",
            hint="let the run finish some episodes first",
        )
    return tuple(found)


def _turn(event: Mapping[str, Any]) -> tuple[float, float, int, int]:
    return event["time"], event["seconds"], event["prompt_tokens"], event["output_tokens"]


def _load(draft: _RecordedEpisode) -> EpisodeLoad:
    """Return a load. Tools take the gap between a reply's end and the next request; the rest of the
    agent's time follows the last turn."""
    turns = sorted(draft.turns)
    gaps = [max(later[0] - later[1] - earlier[0], 0.0) for earlier, later in pairwise(turns)]
    modelled = sum(turn[1] for turn in turns) + sum(gaps)
    gaps.append(max(draft.phases.get(_AGENT, 0.0) - modelled, 0.0))
    before = sum(draft.phases.get(name, 0.0) for name in _BEFORE)
    known = (*_BEFORE, _AGENT, *_INSIDE)
    return EpisodeLoad(
        turns=tuple(
            TurnLoad(prompt, output, gap)
            for (_, _, prompt, output), gap in zip(turns, gaps, strict=True)
        ),
        boot_s=before,
        engine_s=sum(turn[1] for turn in turns),
        grading_s=sum(s for name, s in draft.phases.items() if name not in known),
    )


class LoadSource(Protocol):
    """A source of Episodes."""

    def draw(self, chance: random.Random) -> EpisodeLoad:
        """Return one Episode."""


@dataclass(slots=True)
class EpisodeTrace:
    load: EpisodeLoad
    ended: Signal = field(default_factory=Signal)
    ended_at: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by activity, from its request to its end."""
    rows: list[int] = field(default_factory=list)
    """Lengths of the training rows of the last attempt."""
    turns: int = 0
    timed_out: bool = False

    @property
    def sandbox_s(self) -> float:
        """Seconds in which it held a sandbox."""
        return sum(self.parts.values()) - self.parts["a free slot"]

    @property
    def engine_s(self) -> float:
        """Seconds of its requests."""
        return self.parts["prompts"] + self.parts["replies"]


@dataclass(slots=True)
class EpisodeRunner:
    """Runs Episodes on engines and sandbox slots."""

    clock: SimulatedClock
    machine: SimulatedMachine
    slots: SimulatedSlots
    agent_s: float
    """Budget of the agent; the turn that exceeds it is finished."""
    cores: SimulatedCores = field(init=False)
    engines: list[SimulatedEngine] = field(default_factory=list)
    turn_times: list[float] = field(default_factory=list)
    _busy: Counter[int] = field(default_factory=Counter)
    _sessions: int = 0

    def __post_init__(self) -> None:
        machine, self.cores = self.machine, SimulatedCores(self.clock, self.machine.cores)
        used = machine.engine_cores
        cores = self.cores if used else SimulatedCores(self.clock)
        self.engines = [
            SimulatedEngine(self.clock, machine.speed, machine.cache_tokens, cores, used)
            for _ in range(machine.num_engines)
        ]

    def begin(self, load: EpisodeLoad) -> EpisodeTrace:
        trace = EpisodeTrace(load)
        self.clock.start(self._run(trace)).then(trace.ended.fire)
        return trace

    def _run(self, trace: EpisodeTrace) -> Process:
        wanted = self.clock.now
        yield self.slots.take()
        trace.parts["a free slot"] = self.clock.now - wanted
        for turns in trace.load.lost:
            yield from self._attempt(trace, trace.load.turns[:turns])
        yield from self._attempt(trace, trace.load.turns)
        yield from self._in_sandbox(trace, "grading", trace.load.grading_s)
        self.slots.give()
        trace.ended_at = self.clock.now

    def _attempt(self, trace: EpisodeTrace, turns: Sequence[TurnLoad]) -> Process:
        yield from self._in_sandbox(trace, "starting sandboxes", trace.load.boot_s)
        place = min(range(len(self.engines)), key=lambda number: self._busy[number])
        self._sessions, session = self._sessions + 1, self._sessions
        self._busy[place] += 1
        trace.rows = []
        yield from self._agent(trace, turns, self.engines[place], session)
        self._busy[place] -= 1
        self.engines[place].forget(session)

    def _agent(
        self, trace: EpisodeTrace, turns: Sequence[TurnLoad], engine: SimulatedEngine, session: int
    ) -> Process:
        began, length = self.clock.now, 0
        for turn in turns:
            trace.parts["the gateway"] += self.machine.gateway_s
            yield self.machine.gateway_s
            request = engine.ask(session, turn.prompt_tokens, turn.output_tokens)
            yield request.done
            trace.parts["prompts"] += request.decoding - request.began
            trace.parts["replies"] += request.ended - request.decoding
            self.turn_times.append(self.clock.now)
            trace.turns += 1
            if turn.prompt_tokens < length:
                trace.rows.append(length)
            length = request.size
            left = self.agent_s - (self.clock.now - began)
            yield from self._in_sandbox(trace, "tools", max(min(turn.tool_s, left), 0.0))
            if turn.tool_s >= left or self.clock.now - began > self.agent_s:
                trace.timed_out = True
                break
        trace.rows += [length] if length else []

    def _in_sandbox(self, trace: EpisodeTrace, part: str, seconds: float) -> Process:
        began = self.clock.now
        yield from self.cores.work(seconds, self.machine.sandbox_cores)
        trace.parts[part] += self.clock.now - began
