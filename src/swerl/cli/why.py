"""`swerl why`: name the cause of a sick run, with the evidence and the key to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import JsonOption, RunsOption
from swerl.cli._output import console, counted, print_json, safe
from swerl.cli.train_status import called, find_run
from swerl.core.errors import InputError, SwerlError
from swerl.runs.index import find_runs
from swerl.runs.why import Diagnosis, diagnose

_NUM_SHOWN = 8
"""Problems that are printed; a folder without permission has one for each Episode."""


def why(
    run: Annotated[
        str | None,
        typer.Argument(help="A run of `swerl train`; the newest by default."),
    ] = None,
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Name the most likely cause of a sick run first; exit code 1 if there is one."""
    places = [runs] if run is None else [runs / run, Path(run)]
    # The newest run, if the folder has several.
    candidates = [candidate for place in places for candidate in find_runs(place).values()]
    roots = [candidate.root for candidate in candidates if candidate.has_steps]
    if run is None and not roots:
        hint = "name another folder by --runs; `swerl train twin_cpu` makes a run"
        raise InputError(f"there is no run in {runs}", hint=hint)
    root = roots[0] if roots else find_run(str(run), runs)
    diagnosis = diagnose(root)
    if as_json:
        print_json(diagnosis)
    else:
        show(diagnosis, called(root))
    if diagnosis.findings:
        raise typer.Exit(1)


def print_cause(root: Path, *, says_healthy: bool = False) -> None:
    """Print the first cause of a run in up to three lines; a healthy one if asked for."""
    try:
        diagnosis = diagnose(root)
    except SwerlError:  # The command's own result must not be lost for it.
        return
    if diagnosis.findings or says_healthy:
        for title, line in zip(("why", "", ""), diagnosis.lines(), strict=False):
            console().print(f"{title:15} {safe(line)}", soft_wrap=True)


def show(diagnosis: Diagnosis, name: str) -> None:
    """Print every finding of a run, the most likely first."""
    out = console()

    def say(text: str, style: str = "") -> None:
        out.print(safe(text), style=style, soft_wrap=True)

    for place, finding in enumerate(diagnosis.findings):
        say(f"{finding.cause}: {finding.says}", "bold red" if not place else "yellow")
        for line in finding.evidence:
            say(f"  evidence   {line}")
        say(f"  since      step {finding.step}")
        say(
            f"  change     {finding.key}: {finding.fix}"
            if finding.key
            else f"  do         {finding.fix}"
        )
    if not diagnosis.findings:
        say(f"{diagnosis.run}: {next(diagnosis.lines())}", "green")
    for problem in diagnosis.problems[:_NUM_SHOWN]:
        say(f"  not read   {problem}", "yellow")
    if more := diagnosis.problems[_NUM_SHOWN:]:
        say(f"  not read   and {counted(len(more), 'file')} more: --json")
    if diagnosis.findings:
        others = counted(len(diagnosis.findings), "finding")
        say(f"{others} in {diagnosis.run}; next: swerl view {name}")
