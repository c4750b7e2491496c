"""`swerl doctor`: check this machine and print what to fix."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swerl.cli._options import JsonOption, RunsOption
from swerl.cli._output import console, print_json, simple_table
from swerl.cli._run import waiting

if TYPE_CHECKING:
    from swerl.checks.doctor import Check

_NARROW = 80
"""Columns below which a table breaks words: the checks are then printed as sentences."""
_COLOURS = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Check this machine and print what to fix; exit code 1 if the twin cannot run."""
    import asyncio

    from swerl.checks.doctor import examine, twin_runs

    with waiting("opening a sandbox, importing torch"):
        checks = asyncio.run(examine(runs))
    good = twin_runs(checks)
    if as_json:
        _print_json(checks, good)
    else:
        _show(checks, good)
    if not good:
        raise typer.Exit(1)


def _print_json(checks: list[Check], good: bool) -> None:

    # Released versions call this key `mend`.
    rows = [
        {"mend" if key == "fix" else key: value for key, value in asdict(check).items()}
        for check in checks
    ]
    print_json({"twin_runs": good, "checks": rows})


def _show(checks: list[Check], good: bool) -> None:
    from rich.markup import escape

    table = simple_table("", "check", "found", "enables", whole=("", "check"))
    for check in checks:
        state = f"[{_COLOURS[check.state]}]{check.state}[/]"
        table.add_row(state, check.name, escape(check.found), check.enables)
        if console().width < _NARROW:
            console().print(f"{state} {check.name}: {escape(check.found)}; for {check.enables}")
    if console().width >= _NARROW:
        console().print(table)
    for check in checks:
        if check.fix:
            colour = _COLOURS[check.state]
            console().print(f"[{colour}]{check.name}[/]: {escape(check.fix)}", soft_wrap=True)
    if good:
        console().print("next: swerl train twin_cpu")
    else:
        console().print("[red]the twin cannot run here[/]: fix the missing parts first")
