"""`swerl doctor`: check this machine and print what to fix."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer
from rich.markup import escape

from swerl.checks.doctor import Check, examine, twin_runs
from swerl.cli._options import JsonOption, RunsOption
from swerl.cli._output import console, print_json, simple_table
from swerl.cli._run import NARROW, waiting

_COLOURS = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Check this machine and print what to fix; exit code 1 if the twin cannot run."""
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
        table.add_row(state, check.name, escape(check.found), check.enables)
        if console().width < NARROW:  # a table would break words
            console().print(f"{state} {check.name}: {escape(check.found)}; for {check.enables}")
    if console().width >= NARROW:
        console().print(table)
    for check in checks:
        if check.fix:
            colour = _COLOURS[check.state]
            console().print(f"[{colour}]{check.name}[/]: {escape(check.fix)}", soft_wrap=True)
    if good:
        console().print("next: swerl train twin_cpu")
    else:
        console().print("[red]the twin cannot run here[/]: fix the missing parts first")
