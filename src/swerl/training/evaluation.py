"""Evaluate on Tasks that are never trained on: when, which agents, and the best step.

An evaluation runs between two steps, while the newest weights serve and no others are loaded, so
its Episodes see one version. Episodes lost to the infrastructure enter no mean; they are counted.
With several agents each one attempts every Task, those that are held out of training too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from swerl.core.events import EvalEnded, Notice, Progress
from swerl.core.files import read_json
from swerl.core.task import Task
from swerl.recipe.schema import EvalSection, Recipe
from swerl.rollout import evaluation
from swerl.rollout.parts import MixedAgent, Parts
from swerl.rollout.schedules import Schedule
from swerl.rollout.step import require_few_lost
from swerl.runs.layout import Best, RunFolder
from swerl.runs.statistics import Rate

BEST_SPLIT = "heldout"
"""Split whose pass@1 selects the best step; the checkpoint of that step is kept."""


def is_due(step: int, section: EvalSection) -> bool:
    """Return whether to evaluate before this step; the last evaluation comes in addition."""
    return step == 0 or bool(section.every and step % section.every == 0)


async def evaluate(
    splits: Mapping[str, Sequence[Task]],
    step: int,
    parts: Parts,
    folder: RunFolder,
    *,
    recipe: Recipe,
    schedule: Schedule,
) -> None:
    """Evaluate every split once per step, however often the run resumes; record the best step.

    Raises RunError if the infrastructure lost more Episodes than the recipe allows.
    """
    k = recipe.eval.attempts
    for split, tasks in splits.items():
        names = {f"eval-{split}-{step:05d}": parts}
        if parts.mix:
            names = {f"eval-{split}-{a.name}-{step:05d}": parts.of(a) for a in parts.mix}
        for name, parts_of_agent in names.items():
            # A name in `evals_done` belongs to a finished evaluation, also of an earlier process.
            if not tasks or name in folder.read_state().evals_done:
                continue
            # The whole name of a split has its agent, if there are several.
            event = EvalEnded(step, split, 0.0, 0, agent=parts_of_agent.agent if parts.mix else "")
            parts.emit(Progress(f"evaluating {event.name}", 0, len(tasks) * k))
            # From here until the next step no other weights are loaded.
            await schedule.settle()
            evaluated = await evaluation.evaluate(
                tasks, parts_of_agent, folder, num_attempts=k, stage=name
            )
            lost = [row["reason"] for row in evaluated.attempts if not row["counted"]]
            require_few_lost(lost, len(evaluated.attempts))
            about = {"step": step, "split": split, "name": f"{recipe.name}-{name}"}
            report = (
                evaluation.report_of(evaluated, recipe, k=k, agent=parts_of_agent.agent) | about
            )
            evaluation.write(folder, name, evaluated, report)
            _emit(parts, event, report)
            # The commit comes last: a crash before it repeats the evaluation from its Episodes.
            best = None
            if name == [*names][-1] and split == BEST_SPLIT:
                best = Best(step, split, _trained_rate(folder, names, parts.mix))
            _commit(folder, name, best)


def _trained_rate(folder: RunFolder, names: Iterable[str], mix: Sequence[MixedAgent]) -> float:
    """Return pass@1; of several agents the mean by share, so that none held out has a say."""
    rates = [read_json(folder.evaluation(name))["pass_at_1"]["mean"] for name in names]
    return fmean(rates, [agent.share for agent in mix] or None)


def _emit(parts: Parts, event: EvalEnded, report: Mapping[str, Any]) -> None:
    at_1, at_k = Rate(**report["pass_at_1"]), Rate(**report["pass_at_k"])
    parts.emit(
        replace(
            event,
            solve_rate=at_1.mean,
            num_episodes=report["num_attempts"],
            low=at_1.low,
            high=at_1.high,
            k=report["k"],
            pass_at_k=at_k.mean,
            pass_at_k_low=at_k.low,
            pass_at_k_high=at_k.high,
            num_tasks=at_1.num_tasks,
            num_lost=report["num_lost"],
        )
    )
    if len(report["versions"]) > 1:
        names = ", ".join(report["versions"])
        parts.emit(Notice(f"the evaluation of {event.name} mixes the weights {names}"))


def _commit(folder: RunFolder, name: str, result: Best | None) -> None:
    """Record that an evaluation is done, and its step if it is better than the best so far."""
    state = folder.read_state()
    best = state.best
    if result and (best is None or result.pass_at_1 > best.pass_at_1):
        best = result
    folder.write_state(replace(state, evals_done=(*state.evals_done, name), best=best))
