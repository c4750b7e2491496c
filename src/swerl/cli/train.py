"""`swerl train`: run a recipe; show, stop, resume and rewind runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import JsonOption, RecipeSettingsOption, RunsOption
from swerl.cli._output import console, print_json
from swerl.cli._train_view import TrainView, show_summary
from swerl.cli.train_status import called, facts_of, find_run
from swerl.cli.why import print_cause
from swerl.core.errors import InputError, RunError, RunStoppedError
from swerl.core.secrets import HIDDEN_LOGIN
from swerl.plan.plan import plan
from swerl.recipe.check import check
from swerl.recipe.load import load, recorded
from swerl.recipe.schema import Recipe
from swerl.runs.index import RECIPE
from swerl.runs.layout import RunFolder
from swerl.runs.layout import rewind as go_back
from swerl.runs.status import RunStatus, StatusReport, StopRequest, request_stop, run_status


def train(
    recipes: Annotated[
        list[Path], typer.Argument(help="Recipe files; later ones override earlier ones.")
    ],
    settings: RecipeSettingsOption = None,
    runs: RunsOption = Path("runs"),
    allow_uncertified: Annotated[
        bool,
        typer.Option("--allow-uncertified", help="Also train on tasks without a certificate."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, print its plan, start nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model by a recipe; run the same command again to resume."""
    allowed = ["tasks.uncertified=true"] if allow_uncertified else []
    recipe = load(recipes, [*(settings or ()), *allowed], fetch=not dry_run)
    if dry_run:
        from swerl.cli._plan_view import show_plan

        if not show_plan(recipe, as_json=as_json):
            raise typer.Exit(2)
        return
    _train(recipe, runs / recipe.name, "run the same command again to resume", as_json=as_json)


def _train(recipe: Recipe, root: Path, after: str, *, as_json: bool = False) -> None:
    check(recipe)
    for obstacle in plan(recipe).obstacles:
        raise obstacle
    from swerl.cli._run import INTERRUPTED, TERMINATED, Grace, run
    from swerl.training.train import train

    grace = Grace(recipe.budgets.grace_s, lambda: request_stop(root, StopRequest.STEP))
    with TrainView(recipe) as view:
        try:
            past = run(train(recipe, root, view), after=after, grace=grace)
        except RunStoppedError as error:
            console().print(f"[yellow]stopped[/]: {error}; {after}", soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception:
            print_cause(root)
            raise
    state = RunFolder(root).read_state()
    if as_json:
        print_json(facts_of(root))
    if state.finished:
        show_summary(root, past)
        print_cause(root, says_healthy=not recipe.sft.sources)
        return
    why, cap = "as asked", recipe.cost.max_dollars
    if cap is not None and max(past.series("dollars"), default=0.0) >= cap:
        why = f"for cost.max_dollars = {cap:g}"
        after = "go on with swerl train RECIPE --set cost.max_dollars=DOLLARS"
    outcome = f"stopped after step {state.step} of {recipe.steps}, {why}"
    console().print(f"[yellow]{outcome}[/]; {after}", soft_wrap=True)
    print_cause(root)
    if grace.is_asked:
        raise typer.Exit(TERMINATED)


def resume(
    run: Annotated[str, typer.Argument(help="Name of the run, or its folder.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Resume a run with the recipe in its folder."""
    root = find_run(run, runs)
    recipe = recorded(root / RECIPE)
    if HIDDEN_LOGIN in recipe.model_dump_json():
        raise InputError(
            f"the recipe of {root} has a URL with a login, which the run folder does not store",
            hint="resume with the command that started the run",
        )
    after = f"`swerl train resume {called(root)}` resumes it"
    _train(recipe, root, after)


def stop(
    run: Annotated[str, typer.Argument(help="Name of the run, or its folder.")],
    runs: RunsOption = Path("runs"),
    now: Annotated[
        bool, typer.Option("--now", help="Stop at once, not after the current step.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Maximum seconds to wait.")
    ] = 3600.0,
) -> None:
    """Stop a run after its current step, from any machine that shares the run folder."""
    root = find_run(run, runs)
    name = called(root)
    before = run_status(root)
    if before.status is not RunStatus.RUNNING:
        hint = f"see `swerl train status {name}`; `swerl train resume {name}` resumes it"
        raise RunError(f"{root} is not running: {before.status}", hint=hint)
    request_stop(root, StopRequest.NOW if now else StopRequest.STEP)
    when = "at once" if now else "after its step"
    console().print(f"requested {root.name} to stop {when}", soft_wrap=True)
    after = _wait(root, wait_s)
    if after.status is RunStatus.RUNNING:
        message = f"{root} still runs after {wait_s:g} s; the stop request stays"
        hint = f"wait longer, or `swerl train stop {name} --now`"
        raise RunError(message, hint=hint)
    console().print(f"{root.name}: {after.status}")
    verb = "status" if after.status is RunStatus.FINISHED else "resume"
    console().print(f"next: swerl train {verb} {name}", soft_wrap=True)


def _wait(root: Path, wait_s: float) -> StatusReport:
    until = time.monotonic() + wait_s
    while (report := run_status(root)).status is RunStatus.RUNNING and time.monotonic() < until:
        time.sleep(0.2)
    return report


def rewind(
    run: Annotated[str, typer.Argument(help="Name of the run, or its folder.")],
    step: Annotated[int, typer.Option(help="Step of the checkpoint.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Set a run back to an earlier checkpoint; `swerl train resume` continues there."""
    root = find_run(run, runs)
    aside = go_back(root, step)
    console().print(f"{root} is at step {step}", soft_wrap=True)
    if aside is not None:
        console().print(f"later episodes  {aside}", soft_wrap=True)
    console().print(f"next            swerl train resume {called(root)}", soft_wrap=True)
