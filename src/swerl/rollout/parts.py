"""The parts that all Episodes of a run share, and the clock of one Episode."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

from swerl.core.contracts import Harness, Reward
from swerl.core.events import Emit, PhaseEnded, PhaseStarted
from swerl.core.experts import ExpertSpool
from swerl.core.turn import seed_of
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.server import Gateway
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout.sandbox_pool import SandboxPool


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that all Episodes of a run share."""

    gateway: Gateway
    sandboxes: SandboxPool
    harness: Harness
    reward: Reward
    rollout: RolloutSection
    budgets: BudgetsSection
    seed: int
    emit: Emit
    on_turn: Callable[[TurnRecord], None] | None = None
    """Called with the full text of every Turn, which events leave out; for transcripts."""
    spool: ExpertSpool | None = None
    """Storage for recorded experts until an Episode is written."""
    agent: str = ""
    """Name of the agent behind `harness`."""
    mix: tuple[MixedAgent, ...] = ()
    """All agents of a run with several; a Group has one of them."""

    def of(self, agent: MixedAgent) -> Parts:
        """Return the parts with only this agent."""
        return replace(self, harness=agent.harness, agent=agent.name, mix=())

    def drawn(self, group: str) -> Parts:
        """Return the parts with the agent of a Group, drawn by share.

        The draw depends on the run's seed and the Group's name alone, so a resumed run repeats it.
        """
        if not self.mix:
            return self
        ends = list(accumulate(agent.share for agent in self.mix))
        point = seed_of(self.seed, f"agent/{group}") / 2**31 * ends[-1]
        return self.of(self.mix[bisect_right(ends, point)])


@dataclass(frozen=True, slots=True)
class MixedAgent:
    """One of several agents of a run."""

    name: str
    harness: Harness
    share: float
    """Its share of the training Groups; 0 if it is held out."""


class Clock:
    """Measures the phases of one Episode and emits them; phases of one name add up."""

    def __init__(self, episode: str, emit: Emit) -> None:
        self._episode = episode
        self._emit = emit
        self._started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase."""
        self._emit(PhaseStarted(self._episode, name))
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add a phase that was measured elsewhere and has just ended."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._emit(PhaseEnded(self._episode, name, seconds))

    @property
    def total(self) -> float:
        """Seconds since the Episode began."""
        return time.monotonic() - self._started
