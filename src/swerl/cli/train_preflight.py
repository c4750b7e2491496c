"""`swerl train preflight`: look at every machine of a recipe before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swerl.cluster.checks import MachineFinding
    from swerl.recipe.schema import Recipe

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def preflight(
    recipes: Annotated[
        list[Path], typer.Argument(help="Recipe files; later ones override earlier ones.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check machines, folders, clocks, collectives and sandboxes; exit code 1 where one fails."""
    import json
    from dataclasses import asdict

    from swerl.cli._run import run
    from swerl.recipe.load import load

    recipe = load(recipes, settings or ())
    found = run(_collect(recipe, runs / recipe.name, quiet=as_json), after="nothing was started")
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=1))
    else:
        _close(found)
    if any(each.state == "fail" for each in found):
        raise typer.Exit(1)


async def _collect(recipe: Recipe, root: Path, *, quiet: bool) -> list[MachineFinding]:
    from swerl.checks.preflight import preflight as look

    found = []
    async for finding in look(recipe, root):
        found.append(finding)
        if not quiet:
            _show(finding)
    return found


def _show(finding: MachineFinding) -> None:
    from rich.markup import escape

    from swerl.cli._output import console

    state = f"[{_COLOURS[finding.state]}]{finding.state:<4}[/]"
    line = f"{state}  {escape(finding.node):<12}  {finding.check:<13}  {escape(finding.found)}"
    console().print(line, soft_wrap=True)
    if finding.fix:
        console().print(f"      {'':<12}  -> {escape(finding.fix)}", soft_wrap=True)


def _close(found: list[MachineFinding]) -> None:
    from swerl.cli._output import console

    bad = sum(each.state == "fail" for each in found)
    text = f"[red]{bad} of {len(found)} checks failed[/]" if bad else f"{len(found)} checks passed"
    console().print(f"{text}; next: {'fix those' if bad else 'swerl train RECIPE'}")
