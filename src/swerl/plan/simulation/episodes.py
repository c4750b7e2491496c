"""Episodes in the simulation: sandboxes, turns at engines, tools and tests."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swerl.plan.simulation.engine import Clock, Process, Signal, SimEngine, Slots
from swerl.plan.simulation.load import EpisodeLoad, TurnLoad
from swerl.plan.simulation.machine import SimMachine


class Source(Protocol):
    """Where Episodes come from."""

    def draw(self, chance: random.Random) -> EpisodeLoad:
        """Return one Episode."""


@dataclass(slots=True)
class Trace:
    """What became of one Episode."""

    load: EpisodeLoad
    ended: Signal = field(default_factory=Signal)
    ended_at: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by what they went to; together those from wanting it to its end."""
    rows: list[int] = field(default_factory=list)
    """Lengths of what is trained, of the last attempt."""
    turns: int = 0
    timed_out: bool = False

    @property
    def sandbox_s(self) -> float:
        """Seconds that a sandbox was held."""
        return sum(self.parts.values()) - self.parts["a free place"]


@dataclass(slots=True)
class Floor:
    """Engines, places for sandboxes, and the Episodes among them."""

    clock: Clock
    machine: SimMachine
    slots: Slots
    agent_s: float
    """Budget of the agent's work; the turn under way at its end is finished."""
    engines: list[SimEngine] = field(default_factory=list)
    turn_times: list[float] = field(default_factory=list)
    _busy: Counter[int] = field(default_factory=Counter)
    _sessions: int = 0

    def __post_init__(self) -> None:
        """Make the engines."""
        self.engines = [
            SimEngine(self.clock, self.machine.speed, self.machine.cache_tokens)
            for _ in range(self.machine.num_engines)
        ]

    def begin(self, load: EpisodeLoad) -> Trace:
        """Start an Episode."""
        trace = Trace(load)
        self.clock.start(self._run(trace)).then(trace.ended.fire)
        return trace

    def _run(self, trace: Trace) -> Process:
        wanted = self.clock.now
        yield self.slots.take()
        trace.parts["a free place"] = self.clock.now - wanted
        for turns in trace.load.lost:
            yield from self._attempt(trace, trace.load.turns[:turns])
        yield from self._attempt(trace, trace.load.turns)
        yield from self._for(trace, "grading", trace.load.grading_s)
        self.slots.give()
        trace.ended_at = self.clock.now

    def _attempt(self, trace: Trace, turns: Sequence[TurnLoad]) -> Process:
        yield from self._for(trace, "starting sandboxes", trace.load.boot_s)
        place = min(range(len(self.engines)), key=lambda number: self._busy[number])
        self._sessions, session = self._sessions + 1, self._sessions
        self._busy[place] += 1
        trace.rows = []
        yield from self._agent(trace, turns, self.engines[place], session)
        self._busy[place] -= 1
        self.engines[place].forget(session)

    def _agent(
        self, trace: Trace, turns: Sequence[TurnLoad], engine: SimEngine, session: int
    ) -> Process:
        began, length = self.clock.now, 0
        for turn in turns:
            yield from self._for(trace, "the gateway", self.machine.gateway_s)
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
            yield from self._for(trace, "tools", max(min(turn.tool_s, left), 0.0))
            if turn.tool_s >= left:
                trace.timed_out = True
                break
        trace.rows += [length] if length else []

    def _for(self, trace: Trace, part: str, seconds: float) -> Iterator[float]:
        trace.parts[part] += seconds
        if seconds:
            yield seconds
