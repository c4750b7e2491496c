"""`swerl doctor`: check this machine, or that a recipe can be launched, and print what to fix."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from swerl.checks.doctor import Check, examine, twin_runs
from swerl.cli._options import JsonOption, RecipeSettingsOption, RunsOption
from swerl.cli._output import console, print_json, simple_table
from swerl.cli._run import run, waiting

if TYPE_CHECKING:
    from swerl.checks.launch import FirstDay
    from swerl.cluster.checks import MachineFinding
    from swerl.plan.plan import RecipePlan

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "red", "fail": "red"}


def doctor(
    recipes: Annotated[
        list[Path] | None, typer.Argument(help="Recipe files; without one, check this machine.")
    ] = None,
    settings: RecipeSettingsOption = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or the launch of a recipe, and print what to fix.

    Exit code 1 if a check of the recipe fails, or if the twin cannot run.
    """
    if recipes:
        _examine_recipe(recipes, settings or (), runs, as_json=as_json)
        return
    with waiting("opening a sandbox, importing torch"):
        checks = asyncio.run(examine(runs))
    good = twin_runs(checks)
    if as_json:
        print_json({"twin_runs": good, "checks": checks})
    else:
        _show(checks, good)
    if not good:
        raise typer.Exit(1)


def _show(checks: list[Check], good: bool) -> None:
    table = simple_table("", "check", "found", "enables", whole=("", "check"))
    for check in checks:
        state = f"[{_COLOURS[check.state]}]{check.state}[/]"
        table.add_row(state, check.name, escape(check.detail), check.enables)
    console().print(table)
    for check in checks:
        if check.fix:
            colour = _COLOURS[check.state]
            console().print(f"[{colour}]{check.name}[/]: {escape(check.fix)}", soft_wrap=True)
    if good:
        console().print("next: swerl train twin_cpu")
    else:
        console().print("[red]the twin cannot run here[/]: fix the missing parts first")


def _examine_recipe(
    recipes: list[Path], settings: Sequence[str], runs: Path, *, as_json: bool
) -> None:
    from swerl.checks.launch import first_day
    from swerl.plan.plan import plan
    from swerl.recipe.load import load

    recipe = load(recipes, settings)
    planned = plan(recipe)
    work = _collect(planned, runs / recipe.name, quiet=as_json)
    findings = run(work, after="nothing was started")
    failed = sum(finding.state == "fail" for finding in findings)
    day = first_day(planned)
    if as_json:
        print_json({"fits": not failed, "checks": findings, "first_day": day})
    else:
        _close(failed, len(findings), day)
    if failed:
        raise typer.Exit(1)


async def _collect(planned: RecipePlan, root: Path, *, quiet: bool) -> list[MachineFinding]:
    from swerl.checks.launch import examine_recipe

    findings = []
    async for finding in examine_recipe(planned, root):
        findings.append(finding)
        if quiet:
            continue
        state = f"[{_COLOURS[finding.state]}]{finding.state:<4}[/]"
        place = f"{escape(finding.node):<12}  {finding.check:<13}"
        console().print(f"{state}  {place}  {escape(finding.detail)}", soft_wrap=True)
        if finding.fix:
            console().print(f"{'':<20}  fix: {escape(finding.fix)}", soft_wrap=True)
    return findings


def _close(failed: int, num_checks: int, day: FirstDay | None) -> None:
    if day:
        console().print(
            f"the first day by the plan: {day.steps:.0f} steps of {day.step_minutes:.1f} minutes, "
            f"{day.disk_gb:,.0f} GB on the shared disk, ${day.dollars:,.0f}"
        )
    if failed:
        console().print(f"[red]{failed} of {num_checks} checks failed[/]; next: fix those")
    else:
        console().print(f"{num_checks} checks passed; next: swerl train RECIPE")
