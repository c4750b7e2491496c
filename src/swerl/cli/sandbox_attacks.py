"""`swerl sandbox attacks`: attack a sandbox, and print which attacks worked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swerl.checks.attacks import runner
from swerl.checks.attacks.attack import Attack, AttackOutcome
from swerl.checks.attacks.runner import AttackReport, Subject
from swerl.cli._options import (
    BackendOption,
    JsonOption,
    SettingsOption,
    open_backend,
    sandbox_settings,
)
from swerl.cli._output import console, print_json, simple_table
from swerl.core.errors import InputError

_COLOURS = {"PASS": "green", "FAIL": "bold red", "CANNOT": "yellow"}


def attacks(
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    image: Annotated[str, typer.Option(help="Image of the attacked sandboxes.")] = "host",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this attack; may be repeated.")
    ] = None,
    external: Annotated[
        bool,
        typer.Option(
            "--external", help="Also send packets to real addresses outside of this machine."
        ),
    ] = False,
    run: Annotated[
        Path | None, typer.Option(help="Write the results to this run folder, as probe.json.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results to this file.")] = None,
    as_json: JsonOption = False,
    show: Annotated[bool, typer.Option("--list", help="List the attacks and run none.")] = False,
) -> None:
    """Attack a sandbox and print the results; exit code 1 if an attack worked."""
    chosen = runner.choose(only or ())
    if show:
        if as_json:
            print_json([{"name": item.name, "sentence": item.sentence} for item in chosen])
        else:
            _list(chosen)
        return
    place = _place(run, out)
    sandboxes = open_backend(backend, settings, run="probe")
    subject = Subject(sandboxes, backend, image, options=sandbox_settings(settings))
    found = _attack(subject, chosen, external)
    kept = runner.keep(found, place)
    if as_json:
        print_json(found.to_json())
    else:
        console().print(_table(found))
    console().print(_summary(found), soft_wrap=True)
    console().print(f"kept in {kept}", soft_wrap=True, markup=False)
    if found.counts[AttackOutcome.FAIL]:
        raise typer.Exit(1)


def _place(run: Path | None, out: Path | None) -> Path | None:
    """Return the file for the results; None: the state folder."""
    if run and out:
        raise InputError(
            "both --run and --out name a file for the results", hint="give one of them"
        )
    if run and not run.is_dir():
        raise InputError(
            f"there is no run folder {run}", hint="name a folder under runs/, or use --out FILE"
        )
    return run / "probe.json" if run else out


def _attack(subject: Subject, chosen: list[Attack], external: bool) -> AttackReport:
    from swerl.cli._run import progress_bar, run

    with progress_bar("attacks", len(chosen)) as advance:
        attacking = runner.attack(subject, chosen, external=external, on_result=lambda _: advance())
        return run(attacking, after="every sandbox is closed")


def _list(chosen: list[Attack]) -> None:
    table = simple_table("attack", "what it tries", whole=("attack",))
    for item in chosen:
        table.add_row(item.name, item.sentence)
    console().print(table)


def _table(report: AttackReport) -> Table:
    titles = ("attack", "what it tries", "result", "what was seen")
    table = simple_table(*titles, whole=("attack", "result"))
    for row in report.rows:
        result = row.finding.result.value
        colour = f"[{_COLOURS[result]}]{result}[/]"
        table.add_row(row.name, escape(row.sentence), colour, escape(row.finding.seen))
    return table


def _summary(report: AttackReport) -> str:
    counts = ", ".join(f"{count} {result.value}" for result, count in report.counts.items())
    return f"{report.backend}, image {report.image}: {counts} in {report.duration_s:.1f} s"
