"""The parts that all Episodes of a run share, and the clock of one Episode."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field, replace
from itertools import accumulate

from swerl.core.contracts import Harness, Reward
from swerl.core.errors import BudgetError, SandboxError
from swerl.core.events import Emit, PhaseEnded, PhaseStarted
from swerl.core.experts import ExpertSpool
from swerl.core.turn import seed_of
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.server import Gateway
from swerl.grading.audit import Audit
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout.sandbox_pool import PreparedSandbox, SandboxPool


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
    audit: Audit = field(default_factory=Audit)
    """Confirms solved patches; its state is that of the run."""
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


@dataclass(slots=True)
class _Budget:
    """A budget that runs."""

    text: str
    seconds: float
    timer: asyncio.Timeout
    left_s: float = 0.0
    """Rest of a budget that stands still."""


class Clock:
    """Measures the phases of one Episode and emits them; phases of one name add up.

    Its budgets stand still while a sandbox opens or closes, so that slow infrastructure never
    counts as slowness of the agent or of the patch.
    """

    def __init__(self, episode: str, emit: Emit) -> None:
        self._episode = episode
        self._emit = emit
        self._started = time.monotonic()
        self._budgets: list[_Budget] = []
        self._num_pauses = 0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase."""
        self._emit(PhaseStarted(self._episode, name))
        started, ok = time.monotonic(), False
        try:
            yield
            ok = True
        finally:
            self.add(name, time.monotonic() - started, ok=ok)

    def add(self, name: str, seconds: float, *, ok: bool = True) -> None:
        """Add a phase that was measured elsewhere and has just ended."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._emit(PhaseEnded(self._episode, name, seconds, ok))

    @asynccontextmanager
    async def budget(self, name: str, seconds: float) -> AsyncIterator[None]:
        """Bound the block, which may hold further budgets. Raises BudgetError."""
        text = f"budgets.{name} = {seconds:g} s"
        async with _bounded(seconds, BudgetError(f"{text} ran out")) as timer:
            self._budgets.append(_Budget(text, seconds, timer))
            try:
                yield
            finally:
                self._budgets.pop()

    @asynccontextmanager
    async def opened(
        self, opening: AbstractAsyncContextManager[PreparedSandbox]
    ) -> AsyncIterator[PreparedSandbox]:
        """Open a sandbox, which may take as long as the inmost budget. Raises SandboxError."""
        async with AsyncExitStack() as stack:
            async with self._pause("open"):
                prepared = await stack.enter_async_context(opening)
            yield prepared
            async with self._pause("close"):
                await stack.aclose()

    @asynccontextmanager
    async def _pause(self, verb: str) -> AsyncIterator[None]:
        budget = self._budgets[-1]
        late = SandboxError(f"no sandbox could {verb} within {budget.text}", retryable=True)
        loop = asyncio.get_running_loop()
        self._num_pauses += 1
        if self._num_pauses == 1:
            for each in self._budgets:
                if (when := each.timer.when()) is not None and not each.timer.expired():
                    each.left_s = when - loop.time()
                    each.timer.reschedule(None)
        try:
            async with _bounded(budget.seconds, late):
                yield
        finally:
            self._num_pauses -= 1
            for each in [] if self._num_pauses else self._budgets:
                if not each.timer.expired():
                    each.timer.reschedule(loop.time() + each.left_s)

    @property
    def total(self) -> float:
        """Seconds since the Episode began."""
        return time.monotonic() - self._started


@asynccontextmanager
async def _bounded(seconds: float, error: Exception) -> AsyncIterator[asyncio.Timeout]:
    """Bound the block. Raises the error when the time runs out."""
    try:
        async with asyncio.timeout(seconds) as timer:
            yield timer
    except TimeoutError as inner:
        # Another timer raised the error, inside the block.
        if not timer.expired():
            raise
        raise error from inner
