"""The Tasks of a Recipe: read from files or generated, admitted or refused."""

from __future__ import annotations

from pathlib import Path

from swerl.errors import RecipeError
from swerl.recipe.schema import Recipe
from swerl.task import Task, read_tasks
from swerl.tasks import twin
from swerl.tasks.admission import of_difficulty, require_certified, require_time


def tasks_of(recipe: Recipe, scratch: Path) -> tuple[list[Task], dict[str, list[Task]]]:
    """Return the training Tasks, and the evaluation Tasks by split.

    Generated repositories are written under `scratch`. Raises RecipeError on training Tasks that
    the recipe does not admit.
    """
    if recipe.tasks.source == "twin":
        return _generated(recipe, scratch)
    heldout = recipe.tasks.heldout
    evals = {"heldout": list(read_tasks(Path(heldout)))} if heldout else {}
    return _admitted(recipe), evals


def _admitted(recipe: Recipe) -> list[Task]:
    chosen = recipe.tasks
    tasks = list(read_tasks(Path(chosen.source)))
    if not tasks:
        message = f"{chosen.source} holds no task"
        raise RecipeError(message, hint="`swerl convert` says why rows were rejected")
    if not chosen.uncertified:
        require_certified(tasks, chosen.source)
    require_time(tasks, recipe.budgets.grading_s)
    if chosen.solve_rate:
        tasks = of_difficulty(tasks, chosen.solve_rate, chosen.source)
    return tasks


def _generated(recipe: Recipe, scratch: Path) -> tuple[list[Task], dict[str, list[Task]]]:
    chosen = recipe.tasks
    sizes = {"train": chosen.num_train, "heldout": chosen.num_heldout, "unseen": chosen.num_unseen}
    made = {
        split: twin.make_tasks(scratch, split=split, count=count, seed=recipe.seed)
        for split, count in sizes.items()
        if count
    }
    return made.pop("train"), made
