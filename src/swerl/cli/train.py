"""`swerl train`: run a recipe, resume it, or print its plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipes: Annotated[
        list[Path], typer.Argument(help="Recipe files; later ones override earlier ones.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
    allow_uncertified: Annotated[
        bool,
        typer.Option("--allow-uncertified", help="Train on tasks that were not vetted, too."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print its plan, start nothing.")
    ] = False,
) -> None:
    """Train a model by a recipe; the same command resumes an interrupted run."""
    from swerl.recipe.check import check
    from swerl.recipe.load import load

    allowed = ["tasks.uncertified=true"] if allow_uncertified else []
    recipe = load(recipes, [*(settings or ()), *allowed])
    if dry_run:
        from swerl.cli._plan_view import show_plan

        show_plan(recipe)
        return
    check(recipe)
    from swerl.training.plan import plan

    plan(recipe)
    from swerl import assemble
    from swerl.cli._run import run
    from swerl.cli._train_view import TrainView, show_summary

    with TrainView(recipe) as view:
        work = assemble.train(recipe, runs / recipe.name, view)
        past = run(work, after="the same command goes on where this one stopped")
    show_summary(runs / recipe.name, past)
