"""The parts that all Episodes of a run share, among them the Provisioner of Sandboxes."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

from swerl.core.contracts import Harness, Reward, Sandbox, SandboxBackend
from swerl.core.errors import SandboxError, SandboxFileError
from swerl.core.events import Emit, PhaseEnded, PhaseStarted
from swerl.core.experts import ExpertSpool
from swerl.core.sandbox import Limits
from swerl.core.seeds import seed_of
from swerl.core.task import Task
from swerl.gateway.conversation import TurnRecord
from swerl.gateway.server import Gateway
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.tasks.hide_future import Facts, Stage, hide_future
from swerl.tasks.set_up import set_up


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that all Episodes of a run share."""

    gateway: Gateway
    provisioner: Provisioner
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
        """Return the parts with this agent alone."""
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


class Provisioner:
    """Opens Sandboxes. An Episode holds one at a time, so `concurrency` slots bound them."""

    def __init__(self, backend: SandboxBackend, limits: Limits, *, concurrency: int) -> None:
        self._backend = backend
        self._limits = limits
        self._facts: dict[str, Facts] = {}
        self.slot = asyncio.Semaphore(concurrency)
        """An Episode holds a slot from start to end; waiting for it counts against no budget."""

    @asynccontextmanager
    async def for_agent(self, task: Task, harness: Harness, clock: Clock) -> AsyncIterator[Sandbox]:
        """Open a Sandbox without the repository's future commits, and install the harness.

        The clock records the phase `scrub`. Raises BrokenImageError on a broken repository.
        """
        async with self._backend.open(
            task.image, self._limits, workdir=task.workdir, mounts=harness.mounts()
        ) as sandbox:
            with _before_the_agent():
                with clock.phase("scrub"):
                    await set_up(sandbox, task)
                    hidden = await hide_future(sandbox, task, facts=self._facts.get(task.id))
                self._facts[task.id] = hidden.facts
                await harness.install(sandbox)
            yield sandbox

    @asynccontextmanager
    async def for_grading(self, task: Task) -> AsyncIterator[Sandbox]:
        """Open a clean Sandbox of the Task's image that no agent has used.

        It reveals no more than an agent's, since the code under test may read all of it.
        """
        async with self._backend.open(task.image, self._limits, workdir=task.workdir) as sandbox:
            with _before_the_agent():
                await set_up(sandbox, task)
                known = self._facts.get(task.id)
                hidden = await hide_future(sandbox, task, stage=Stage.GRADING, facts=known)
                self._facts[task.id] = hidden.facts
            yield sandbox


@contextmanager
def _before_the_agent() -> Iterator[None]:
    """Turn an error of a file into one of the Task: no agent has made the path what it is."""
    try:
        yield
    except SandboxFileError as error:
        raise SandboxError(str(error), hint=error.hint) from error


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
