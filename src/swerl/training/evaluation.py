"""Evaluate on Tasks that are never trained on: k attempts each, pass@1 and pass@k over Tasks.

An evaluation runs between two steps, while the newest weights serve and no others are loaded, so
its Episodes see one version. Episodes lost to the infrastructure enter no mean; they are counted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb, sqrt
from typing import Any

from swerl.core.episode import Group
from swerl.core.events import EvalEnded, Notice, Progress
from swerl.core.files import write_json
from swerl.core.task import Task
from swerl.recipe.schema import EvalSection
from swerl.rollout import step as rollout_step
from swerl.rollout.parts import Parts
from swerl.rollout.schedules import Schedule
from swerl.rollout.versions import versions_of
from swerl.runs.layout import Best, RunFolder

Z95 = 1.959963984540054
"""0.975 quantile of the standard normal distribution."""
RESAMPLES = 2000
"""Bootstrap samples: the ends of an interval move by less than one point between seeds."""


def is_due(step: int, section: EvalSection) -> bool:
    """Return whether to evaluate before this step; the last evaluation comes in addition."""
    return step == 0 or bool(section.every and step % section.every == 0)


async def evaluate(
    splits: Mapping[str, Sequence[Task]],
    step: int,
    parts: Parts,
    folder: RunFolder,
    *,
    section: EvalSection,
    schedule: Schedule,
) -> None:
    """Evaluate every split once per step, however often the run resumes; record the best step."""
    for split, tasks in splits.items():
        name = f"eval-{split}-{step:05d}"
        # A name in `evals_done` belongs to a finished evaluation, also of an earlier process.
        if not tasks or name in folder.read_state().evals_done:
            continue
        parts.emit(Progress(f"evaluating {split}", 0, len(tasks) * section.attempts))
        # From here until the next step no other weights are loaded.
        await schedule.settle()
        groups = await rollout_step.evaluate(
            tasks, name, _settings(parts, section), folder, attempts=section.attempts
        )
        found = summary(groups, section.attempts)
        write_json(folder.evaluation(name), {"step": step, "split": split, **found})
        _emit(parts, step, split, found)
        # The commit comes last: a crash before it repeats the evaluation from finished Episodes.
        _commit(folder, name, Best(step, split, found["pass_at_1"]["mean"]), section.best)


def summary(groups: Sequence[Group], k: int) -> dict[str, Any]:
    """Return pass@1 and pass@k with their intervals, and each Task's result, as JSON.

    Only learnable attempts count. A Task without one is in neither mean; a Task with fewer than k
    is not in pass@k.
    """
    rows = [_row(group) for group in groups]
    counted = [row for row in rows if row["attempts"]]
    at_1 = rate([pass_at_k(row["attempts"], row["solved"], 1) for row in counted])
    full = [row for row in counted if row["attempts"] >= k]
    at_k = rate([pass_at_k(row["attempts"], row["solved"], k) for row in full])
    return {
        "k": k,
        "pass_at_1": asdict(at_1),
        "pass_at_k": asdict(at_k),
        "verdicts": dict(Counter(verdict for row in rows for verdict in row["verdicts"])),
        "num_attempts": sum(row["attempts"] for row in rows),
        "num_lost": sum(len(row["verdicts"]) - row["attempts"] for row in rows),
        "versions": sorted({name for g in groups for e in g.episodes for name in versions_of(e)}),
        "tasks": rows,
    }


def _settings(parts: Parts, section: EvalSection) -> Parts:
    own = {"temperature": section.temperature, "max_new_tokens": section.max_new_tokens}
    chosen = {name: value for name, value in own.items() if value is not None}
    return replace(parts, rollout=parts.rollout.model_copy(update=chosen))


def _row(group: Group) -> dict[str, Any]:
    counted = [episode for episode in group.episodes if episode.learnable]
    return {
        "task": group.task_id,
        "attempts": len(counted),
        "solved": sum(episode.verdict == "solved" for episode in counted),
        "verdicts": [str(episode.verdict) for episode in group.episodes],
    }


def _emit(parts: Parts, step: int, split: str, found: Mapping[str, Any]) -> None:
    at_1, at_k = Rate(**found["pass_at_1"]), Rate(**found["pass_at_k"])
    parts.emit(
        EvalEnded(
            step=step,
            split=split,
            solve_rate=at_1.mean,
            num_episodes=found["num_attempts"],
            low=at_1.low,
            high=at_1.high,
            k=found["k"],
            pass_at_k=at_k.mean,
            pass_at_k_low=at_k.low,
            pass_at_k_high=at_k.high,
            num_tasks=at_1.num_tasks,
            num_lost=found["num_lost"],
        )
    )
    if len(found["versions"]) > 1:
        names = ", ".join(found["versions"])
        parts.emit(Notice(f"the evaluation of {split} mixes the weights {names}"))


def _commit(folder: RunFolder, name: str, result: Best, best_of: str) -> None:
    """Record that an evaluation is done, and its step if it is better than the best so far."""
    state = folder.read_state()
    best = state.best
    if result.split == best_of and (best is None or result.pass_at_1 > best.pass_at_1):
        best = result
    folder.write_state(replace(state, evals_done=(*state.evals_done, name), best=best))


@dataclass(frozen=True, slots=True)
class Rate:
    mean: float
    low: float
    high: float
    method: str
    """`wilson` or `bootstrap`."""
    num_tasks: int


def pass_at_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k attempts solves a Task.

    M. Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), eq. 1:
    1 - C(n - c, k) / C(n, k), for n >= k.
    """
    return 1.0 - comb(num_attempts - num_solved, k) / comb(num_attempts, k)


def rate(values: Sequence[float]) -> Rate:
    """Return the mean over Tasks of one value in 0 … 1 each, with its interval.

    If all values are 0 or 1, or all equal, the interval is Wilson's score interval for that many
    draws (E. Wilson, 1927); a bootstrap of equal values would have no width. Otherwise it is a
    percentile bootstrap over Tasks, with a fixed seed. Without Tasks it is 0 … 1.
    """
    num_tasks = len(values)
    if not num_tasks:
        return Rate(0.0, 0.0, 1.0, "wilson", 0)
    mean = sum(values) / num_tasks
    if set(values) <= {0.0, 1.0} or len(set(values)) == 1:
        return Rate(mean, *_wilson(mean, num_tasks), "wilson", num_tasks)
    return Rate(mean, *_bootstrap(values), "bootstrap", num_tasks)


def _wilson(mean: float, count: int) -> tuple[float, float]:
    if mean in (0.0, 1.0):  # one end is exact; rounding would move it
        other = Z95**2 / (count + Z95**2)
        return (0.0, other) if mean == 0.0 else (1.0 - other, 1.0)
    spread = Z95 * sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
    middle, scale = mean + Z95**2 / (2 * count), 1 + Z95**2 / count
    return (middle - spread) / scale, (middle + spread) / scale


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    draws = random.Random(0)
    count = len(values)
    means = sorted(sum(draws.choices(values, k=count)) / count for _ in range(RESAMPLES))
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]
