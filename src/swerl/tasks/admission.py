"""Select the Tasks of a file for training: certified, of the requested difficulty, not held out.

A run keeps the digests of its Tasks, so it never resumes on others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from swerl.core.certificate import objection, row_digest
from swerl.core.errors import RecipeError
from swerl.core.files import read_json, write_json
from swerl.core.task import Task, read_tasks
from swerl.recipe.schema import Recipe


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
    if section.min_swap_bits or section.min_swap_share:
        bits, share = section.min_swap_bits, section.min_swap_share
        tasks = of_strength(tasks, section.source, min_bits=bits, min_share=share)
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
    """Return the time limit of the first run and the measured time of each blind one."""
    measured = task.certificate.get("measured")
    test_s = measured.get("test_s") if isinstance(measured, dict) else None
    spec = task.grading
    num_claims = Counter(test for swap in spec.swaps or () for test in swap.fails)
    least = min(2, spec.blind_runs - 1)
    further = min(spec.blind_runs, max(least, max(num_claims.values(), default=1) - 1))
    num_blind = spec.blind_runs + further + 1 if spec.swaps else 0
    return spec.timeout_s + num_blind * (test_s if isinstance(test_s, float) else 0.0)


def of_strength(
    tasks: Sequence[Task], source: str, *, min_bits: float, min_share: float
) -> list[Task]:
    """Return the Tasks with strong enough swaps, as vetting found.

    A forged report would have to guess `min_bits`, and `min_share` of the tests to fix have a
    secret swap. Raises RecipeError if none is left.
    """
    strengths = [(_found(task, "bits"), _found(task, "swapped_share")) for task in tasks]
    strong = [bits >= min_bits and share >= min_share for bits, share in strengths]
    if any(strong):
        return [task for task, is_strong in zip(tasks, strong, strict=True) if is_strong]
    bits, shares = zip(*strengths, strict=True)
    raise RecipeError(
        f"no task of {source} has {min_bits:g} bits of swaps in {min_share:.0%} of its tests to "
        f"fix; the strongest has {max(bits):g}, the widest {max(shares):.0%}",
        hint="`swerl tasks vet` measures them; lower tasks.min_swap_bits or tasks.min_swap_share",
    )


def _found(task: Task, key: str) -> float:
    measure = task.certificate.get(key)
    return float(measure) if isinstance(measure, int | float) else 0.0


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
