"""Runs policies through whole Episodes, a few at once, and judges how each of them ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum

from swerl.checks.redteam import naive
from swerl.checks.redteam.ground import LIMITS, Machine, scout, task_of, why_not
from swerl.checks.redteam.policy import Policy, Stop
from swerl.core import plugins
from swerl.core.chat import Json, Message, Role, ToolCall
from swerl.core.contracts import SandboxBackend
from swerl.core.episode import Episode
from swerl.core.errors import SwerlError
from swerl.core.events import ignore
from swerl.core.grade import Canary
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.server import Gateway
from swerl.harnesses import builtin
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout import episode
from swerl.rollout.parts import Parts, Provisioner
from swerl.rollout.reward import rule

_BUDGETS = BudgetsSection(
    model_call_s=60, tool_s=60, agent_s=240, grading_s=300, episode_s=540, sandbox_s=600
)
"""Wide, since nothing here says how fast the machine is."""
_ROLLOUT = RolloutSection(max_turns=20, max_new_tokens=60_000, max_context_tokens=500_000)
_SHOWN_CHARS = 300


class Result(StrEnum):
    """How a policy came off."""

    HELD = "held"
    """It ended as it declares, without a reward."""
    BROKE = "BROKE"
    """It was rewarded, or ended otherwise than it declares."""
    SKIPPED = "skipped"
    """It could not be tried; this says nothing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the sheet."""

    policy: Policy
    result: Result
    verdict: str = ""
    reward: float = 0.0
    seen: str = ""
    """The Grade's own reason, or why the policy could not be tried or did not hold."""
    rewarded_naively: bool | None = None
    """Whether a grader without defences rewards it; None where nobody asked."""
    duration_s: float = 0.0

    def to_json(self) -> dict[str, Json]:
        """Return the line with all that is known."""
        return {
            "policy": self.policy.name,
            "tries": self.policy.sentence,
            "ground": self.policy.ground.value,
            "result": self.result.value,
            "verdict": self.verdict,
            "declared": self.policy.verdict.value,
            "reward": self.reward,
            "stopped_by": self.policy.stop.value,
            "seen": self.seen,
            "rewarded_naively": self.rewarded_naively,
            "duration_s": round(self.duration_s, 3),
        }


@dataclass(frozen=True, slots=True)
class Sheet:
    """What became of all policies."""

    backend: str
    image: str
    rows: Sequence[Row]
    duration_s: float

    @property
    def counts(self) -> dict[Result, int]:
        """How many policies came off in each way."""
        found = Counter(row.result for row in self.rows)
        return {result: found[result] for result in Result}

    def to_json(self) -> dict[str, Json]:
        """Return the sheet."""
        return {
            "backend": self.backend,
            "image": self.image,
            "duration_s": round(self.duration_s, 3),
            "counts": {result.value: count for result, count in self.counts.items()},
            "policies": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run policies."""

    name: str = "local"
    """Kind of sandbox, as users type it."""
    image: str = "host"
    num_jobs: int = 4
    """Episodes at once."""
    naively: bool = False
    """Whether each policy is also graded without defences."""


async def run(
    backend: SandboxBackend,
    policies: Sequence[Policy],
    settings: Settings,
    *,
    tell: Callable[[Row], None] = lambda _: None,
) -> Sheet:
    """Run the policies and return their sheet, in their order; `tell` hears of each as it ends.

    Raises SandboxError or ImageError where no sandbox opens, or its image lacks Python or git.
    """
    started = time.monotonic()
    machine = await scout(backend, settings.image)
    scripts = {_episode_id(policy): _replies(policy) for policy in policies}
    family = plugins.family("tiny", None)
    async with AsyncExitStack() as open_parts:
        engine = ScriptedEngine(family, lambda session: scripts[session])
        open_parts.push_async_callback(engine.close)
        gateway = await open_parts.enter_async_context(Gateway(engine=engine, family=family))
        parts = Parts(
            gateway=gateway,
            provisioner=Provisioner(backend, LIMITS, concurrency=settings.num_jobs),
            harness=builtin.build(builtin.Options()),
            reward=rule("solved"),
            rollout=_ROLLOUT,
            budgets=_BUDGETS,
            seed=0,
            emit=ignore,
        )
        stage = _Stage(backend, settings, machine, parts)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(stage.row(policy, tell)) for policy in policies]
    rows = [task.result() for task in running]
    return Sheet(settings.name, settings.image, rows, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Stage:
    backend: SandboxBackend
    settings: Settings
    machine: Machine
    parts: Parts

    async def row(self, policy: Policy, tell: Callable[[Row], None]) -> Row:
        async with self.parts.provisioner.slot:
            row = await self._run(policy)
        tell(row)
        return row

    async def _run(self, policy: Policy) -> Row:
        if reason := why_not(policy, self.machine):
            return Row(policy, Result.SKIPPED, seen=reason)
        started = time.monotonic()
        task = task_of(policy, self.machine, self.settings.image)
        ended = await episode.run(task, _episode_id(policy), self.parts)
        problem = judge(policy, ended)
        result = Result.BROKE if problem else Result.HELD
        seen = " ".join((problem or ended.grade.reason).split())[:_SHOWN_CHARS]
        paid = await self._paid(policy) if self.settings.naively else None
        seconds = time.monotonic() - started
        return Row(policy, result, ended.verdict.value, ended.reward, seen, paid, seconds)

    async def _paid(self, policy: Policy) -> bool | None:
        if policy.harmless:
            return None
        task = task_of(policy, self.machine, self.settings.image)
        try:
            return await naive.rewards(policy, task, self.backend)
        except (SwerlError, FileNotFoundError):
            return False


def judge(policy: Policy, ended: Episode) -> str:
    """Return what is wrong with the end of a policy's Episode; empty where it held."""
    if ended.reward > 0:
        return f"it was rewarded: {ended.grade.reason}"
    if ended.verdict is not policy.verdict:
        return f"it is {ended.verdict} and not {policy.verdict}: {ended.grade.reason}"
    if not _is_stopped(policy.stop, ended):
        return f"something else stopped it than declared: {ended.grade.reason}"
    return ""


def _is_stopped(stop: Stop, ended: Episode) -> bool:
    """Say whether the Episode shows what the policy declares to be stopped by, where that shows."""
    grade = ended.grade
    if stop is Stop.DROPPED:
        return bool(grade.restored)
    if stop in (Stop.CANARY, Stop.TWICE):
        is_shown = grade.canary in (Canary.PASSED, Canary.MISSING)
        return is_shown and bool(grade.tests) == (stop is Stop.CANARY)
    if stop in (Stop.FUTURE, Stop.NETWORK, Stop.SIZE):
        return not ended.patch
    return True


def _episode_id(policy: Policy) -> str:
    return f"redteam/{policy.name}"


def _replies(policy: Policy) -> list[Message]:
    """Return what the policy's model says: each command as a call of its own, then it submits."""
    calls = [ToolCall("", "bash", {"command": command}) for command in policy.commands]
    said = [*calls, ToolCall("", "submit", {})]
    return [Message(Role.ASSISTANT, tool_calls=(call,)) for call in said]
