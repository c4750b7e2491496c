"""`swerl train`: run a recipe, look at runs, stop and resume them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from swerl.cli import train_manifest, train_preflight, train_rewind, train_status, train_stop

if TYPE_CHECKING:
    from swerl.recipe.schema import Recipe

RUN = "run"
"""The command that is meant where none is named: `swerl train RECIPE`."""


class _RunsByDefault(TyperGroup):
    """A group that takes a recipe in place of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before arguments that begin with none of the commands."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_RunsByDefault, no_args_is_help=True)
app.command("status")(train_status.status)
app.command("stop")(train_stop.stop)
app.command("rewind")(train_rewind.rewind)
app.command("preflight")(train_preflight.preflight)
app.command("manifest")(train_manifest.manifest)

RunsOption = Annotated[Path, typer.Option(help="Folder of all run folders.")]


@app.command(RUN)
def train(
    recipes: Annotated[
        list[Path], typer.Argument(help="Recipe files; later ones override earlier ones.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key."),
    ] = None,
    runs: RunsOption = Path("runs"),
    allow_uncertified: Annotated[
        bool,
        typer.Option("--allow-uncertified", help="Train on tasks that were not vetted, too."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print its plan, start nothing.")
    ] = False,
) -> None:
    """Train a model by a recipe; the same command resumes an interrupted run."""
    from swerl.recipe.load import load

    allowed = ["tasks.uncertified=true"] if allow_uncertified else []
    recipe = load(recipes, [*(settings or ()), *allowed])
    if dry_run:
        from swerl.cli._plan_view import show_plan

        show_plan(recipe)
        return
    _train(recipe, runs / recipe.name, "the same command goes on where this one stopped")


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="Name of the run, or its folder.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Go on with a run by the recipe that its folder keeps."""
    from swerl.cli._runs import called, find_run, stored_recipe

    root = find_run(run, runs)
    _train(stored_recipe(root), root, f"`swerl train resume {called(root)}` goes on")


def _train(recipe: Recipe, root: Path, after: str) -> None:
    from swerl.plan.plan import plan
    from swerl.recipe.check import check

    check(recipe)
    plan(recipe)
    from swerl.cli._output import console
    from swerl.cli._run import INTERRUPTED, run
    from swerl.cli._train_view import TrainView, show_summary
    from swerl.core.errors import RunStoppedError
    from swerl.runs.layout import RunFolder
    from swerl.training.train import train

    with TrainView(recipe) as view:
        try:
            past = run(train(recipe, root, view), after=after)
        except RunStoppedError as error:
            console().print(f"[yellow]stopped[/]: {error}; {after}", soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
    state = RunFolder(root).read_state()
    if state.finished:
        show_summary(root, past)
        return
    why, cap = "as asked", recipe.cost.max_dollars
    if cap is not None and max(past.series("dollars"), default=0.0) >= cap:
        why = f"for cost.max_dollars = {cap:g}"
        after = "go on with swerl train RECIPE --set cost.max_dollars=DOLLARS"
    done = f"stopped after step {state.step} of {recipe.steps}, {why}"
    console().print(f"[yellow]{done}[/]; {after}", soft_wrap=True)
