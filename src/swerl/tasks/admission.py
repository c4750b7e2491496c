"""Select the Tasks of a file for training: certified, of the requested difficulty, not held out.

A run keeps the digests of its Tasks, so it never resumes on others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from swerl.core.certificate import objection, row_digest
from swerl.core.errors import RecipeError
from swerl.core.files import read_json, write_json
from swerl.core.task import Strength, Task, read_tasks
from swerl.recipe.schema import Recipe

_CONFIRMING_RUNS = 5
"""Runs that confirm a solved patch, one of them repeated."""


def admitted(recipe: Recipe) -> list[Task]:
    """Return the training Tasks of the recipe's task file. Raises RecipeError if it admits none."""
    section = recipe.tasks
    tasks = list(read_tasks(Path(section.source)))
    if not tasks:
        hint = "`swerl convert` prints why it rejects rows"
        raise RecipeError(f"{section.source} holds no task", hint=hint)
    if not section.uncertified:
        require_certified(tasks, section.source)
    require_time(tasks, recipe.budgets.grading_s)
    tasks = of_strength(tasks, section.source, Strength(section.strength))
    if section.solve_rate:
        tasks = of_difficulty(tasks, section.solve_rate, section.source)
    if section.heldout:
        require_apart(tasks, read_tasks(Path(section.heldout)))
    return tasks


def require_apart(tasks: Iterable[Task], heldout: Iterable[Task]) -> None:
    """Raise RecipeError if a held-out Task is trained, be it under another id."""
    problems = {(task.image, task.base_commit, task.prompt): task.id for task in tasks}
    ids = set(problems.values())
    both = [
        task.id
        for task in heldout
        if task.id in ids or (task.image, task.base_commit, task.prompt) in problems
    ]
    if both:
        raise RecipeError(
            f"{len(both)} tasks of tasks.heldout are also in tasks.source: {_examples(both)}",
            hint="`swerl tasks filter --split` divides a file into two without common tasks",
        )


def require_unchanged(path: Path, tasks: Iterable[Task]) -> None:
    """Write the digests of a run's Tasks, or compare them with those that the run began with.

    Raises RecipeError if a Task was changed, added or removed since.
    """
    digests = {task.id: row_digest(task) for task in tasks}
    if not path.exists():
        write_json(path, digests)
        return
    before = read_json(path)
    ids = [name for name in before | digests if before.get(name) != digests.get(name)]
    if ids:
        raise RecipeError(
            f"{len(ids)} tasks differ from those that {path.parent} began with: {_examples(ids)}",
            hint="restore the task files to resume, or start a new run with --set name=…",
        )


def _examples(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (", …" if len(ids) > 5 else "")


def require_certified(tasks: Sequence[Task], source: str) -> None:
    """Raise RecipeError unless every Task is certified in its present form."""
    objections = [(task.id, why) for task in tasks if (why := objection(task))]
    if not objections:
        return
    name, why = objections[0]
    message = (
        f"{len(objections)} of {len(tasks)} tasks of {source} are not certified: {name}: {why}"
    )
    hint = f"`swerl tasks vet {source}`, or train on them all the same with --allow-uncertified"
    raise RecipeError(message, hint=hint)


def require_time(tasks: Sequence[Task], grading_s: float) -> None:
    """Raise RecipeError if certified Tasks need more grading time than the run allows."""
    slow = [task for task in tasks if task.certificate and _longest_s(task) > grading_s]
    if not slow:
        return
    slowest = max(slow, key=_longest_s)
    limit_s = math.ceil(_longest_s(slowest))
    raise RecipeError(
        f"budgets.grading_s = {grading_s:g}, and grading {slowest.id} may take {limit_s:g} s",
        hint=f"set budgets.grading_s above {limit_s:g}, and episode_s with it",
    )


def _longest_s(task: Task) -> float:
    """Return the time limit of the first run and the measured time of each confirming one."""
    measured = task.certificate.get("measured")
    test_s = measured.get("test_s") if isinstance(measured, dict) else None
    num_runs = _CONFIRMING_RUNS if task.grading.mutated else 0
    return task.grading.timeout_s + num_runs * (test_s if isinstance(test_s, float) else 0.0)


def of_strength(tasks: Sequence[Task], source: str, least: Strength) -> list[Task]:
    """Return the Tasks whose mutated tests are at least so strong, as vetting found.

    Raises RecipeError if none is left.
    """
    if least is Strength.NONE:
        return list(tasks)
    order = [Strength.NONE, Strength.SOME, Strength.STRONG]
    wanted = order[order.index(least) :]
    strong = [task for task in tasks if task.certificate.get("strength") in wanted]
    if strong:
        return strong
    names = [str(task.certificate.get("strength") or "not vetted") for task in tasks]
    counts = ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))
    raise RecipeError(
        f"no task of {source} has the strength {least} ({counts})",
        hint="`swerl tasks vet` measures it; lower tasks.strength",
    )


def of_difficulty(tasks: Sequence[Task], bounds: tuple[float, float], source: str) -> list[Task]:
    """Return the Tasks with a measured solve rate within bounds, ends included.

    Raises RecipeError if none is left.
    """
    low, high = bounds
    rates = [solve_rate(task) for task in tasks]
    suitable = [
        task
        for task, rate in zip(tasks, rates, strict=True)
        if rate is not None and low <= rate <= high
    ]
    if suitable:
        return suitable
    num_probed = len(rates) - rates.count(None)
    raise RecipeError(
        f"no task of {source} has a solve rate from {low:g} to {high:g}; {num_probed} have one",
        hint=f"`swerl tasks solve-rate {source}`, or widen tasks.solve_rate",
    )


def solve_rate(task: Task) -> float | None:
    rate = task.metadata.get("solve_rate")
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    return float(rate) if is_number else None  # type: ignore[arg-type]
