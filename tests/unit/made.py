"""Turns, Episodes, Groups and Tasks: a test names the fields that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Group, Status
from swerl.core.events import ignore
from swerl.core.grade import Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.core.turn import Trajectory, Turn
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout.parts import Parts
from swerl.rollout.reward import reward_of


def turn(
    index: int = 0,
    parent: int | None = None,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (2,),
    version: str = "0",
    **fields: Any,
) -> Turn:
    """Return a Turn; each output token has the log-probability -0.5, if none are given."""
    logprobs = tuple(fields.pop("logprobs", (-0.5,) * len(output)))
    finish = fields.pop("finish", Finish.STOP)
    return Turn(index, parent, tuple(prompt), tuple(output), logprobs, finish, version, **fields)


def episode(
    name: str, *turns: Turn, verdict: str = "solved", reward: float | None = None, **fields: Any
) -> Episode:
    """Return a completed Episode of the Task in its id, `stage/task.attempt`; solved earns 1."""
    fields = {"status": Status.COMPLETED, "grade": Grade(Verdict(verdict))} | fields
    return Episode(
        id=name,
        task_id=fields.pop("task_id", name.rpartition("/")[2].partition(".")[0]),
        reward=float(verdict == "solved") if reward is None else reward,
        trajectory=Trajectory(fields.pop("session", "s"), turns),
        **fields,
    )


def group(task: str, *verdicts: str, turns: Sequence[Turn] = (), **fields: Any) -> Group:
    """Return a Group of one attempt a verdict."""
    episodes = (
        episode(f"{task}.{k}", *turns, verdict=verdict, **fields)
        for k, verdict in enumerate(verdicts)
    )
    return Group(task, tuple(episodes))


def task(name: str, image: str = "host", workdir: str = "/w", **fields: Any) -> Task:
    return Task(name, "r", image, workdir, "p", GradingSpec("command"), **fields)


def parts(**fields: Any) -> Parts:
    """Return what a step reads of a run; nothing in it opens a sandbox or asks an engine."""
    absent = dict.fromkeys(("gateway", "sandboxes", "harness"))
    settings = {"rollout": RolloutSection(), "budgets": BudgetsSection(), "seed": 0, "emit": ignore}
    return Parts(**{**absent, "reward": reward_of("solved"), **settings, **fields})
