"""Grading a patch that somebody else's agent wrote."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from swerl.core import plugins
from swerl.core.contracts import Sandbox
from swerl.core.episode import Status
from swerl.core.errors import SwerlError
from swerl.core.grade import LEARNABLE, Grade, Verdict
from swerl.core.task import Task
from swerl.rollout.parts import Parts


@dataclass(frozen=True, slots=True)
class Graded:
    """What a patch is worth."""

    reward: float | None
    """None where the machinery or the Task failed."""
    verdict: Verdict
    reason: str


async def grade(task: Task, patch: str, parts: Parts) -> Graded:
    """Grade a patch in a clean sandbox; one that the machinery loses is `infra`."""
    async with parts.provisioner.slot:
        try:
            async with asyncio.timeout(parts.budgets.grading_s):
                found = await _grade(task, patch, parts)
        except TimeoutError:
            found = Grade(Verdict.INFRA, f"grading took over {parts.budgets.grading_s:g} s")
        except SwerlError as error:
            found = Grade(Verdict.INFRA, f"{type(error).__name__}: {error}")
    reward = parts.reward(found, Status.COMPLETED) if found.verdict in LEARNABLE else None
    return Graded(reward, found.verdict, found.reason)


async def _grade(task: Task, patch: str, parts: Parts) -> Grade:
    grader = plugins.load("graders", task.grading.grader).build()
    async with AsyncExitStack() as one:

        async def fresh() -> Sandbox:
            await one.aclose()
            return await one.enter_async_context(parts.provisioner.for_grading(task))

        grade: Grade = await grader.grade(task, patch, await fresh(), fresh)
        return grade
