"""`swerl agents compat`: run real agents through scripted conversations, and print the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from swerl.checks.compat.trial import Trial, TrialResult, TrialResults

_NARROW = {
    "branches": "bran-\nches",
    "samples": "sam-\nples",
    "trained": "trai-\nned",
    "outside": "out-\nside",
}
"""Headings in two lines, so that the table fits into 80 columns."""
_COLOURS = {"done": "green", "limit": "green", "gave up": "yellow", "failed": "bold red"}
_LOG_CHARS = 400


def compat(
    *,
    agents: Annotated[
        str, typer.Option(help="Agents, separated by commas: codex, codex@0.94.0. All by default.")
    ] = "",
    cases: Annotated[str, typer.Option(help="Cases, separated by commas. All by default.")] = "",
    families: Annotated[
        str, typer.Option(help="Families; the first meets every agent, others the first agent.")
    ] = "tiny",
    models: Annotated[
        Path | None,
        typer.Option(help="Folder of model folders (tokenizer, chat template) named by family."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every family with every agent.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at once.")] = 1,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the report here: .md or .json.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List agents and cases; run none.")] = False,
) -> None:
    """Run agents offline against a scripted model; exit code 1 if one fails."""
    from swerl.checks.compat import report
    from swerl.cli._output import console
    from swerl.core.errors import InputError

    if out:
        report.check(out)
    if models and not models.is_dir():
        raise InputError(
            f"there is no folder {models}",
            hint="name one that holds a model folder for each family",
        )
    trials = _trials(agents, cases, families, full=full)
    if show:
        _list(trials)
        return
    found = _run(trials, models, jobs)
    for family in dict.fromkeys(row.family for row in found.rows):
        console().print(_table([row for row in found.rows if row.family == family]))
    _print_reasons(found)
    if out:
        report.write(found, out)
        console().print(f"report: {out}", soft_wrap=True, markup=False)
    console().print(f"{len(found.rows)} trials, {len(found.failed)} failed, {found.seconds:.0f} s")
    if found.failed:
        raise typer.Exit(1)


def _trials(agents: str, cases: str, families: str, *, full: bool) -> tuple[Trial, ...]:
    from swerl.checks.compat.cases import CASES, choose_agents, find_case
    from swerl.checks.compat.trial import plan
    from swerl.core import plugins

    names = _split(families)
    for name in names:
        plugins.load("families", name)
    chosen = [find_case(name) for name in _split(cases) or tuple(CASES)]
    return plan(choose_agents(_split(agents)), chosen, names, full=full)


def _split(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def _run(trials: tuple[Trial, ...], models: Path | None, jobs: int) -> TrialResults:
    from swerl.checks.compat.trial import run_all
    from swerl.cli._run import progress_bar, run
    from swerl.rollout.wiring import open_backend
    from swerl.sandboxes import local

    backend = open_backend("local", local.Options(), run="compat")
    with progress_bar("trials", len(trials)) as advance:

        def on_done(row: TrialResult) -> None:
            advance(description=f"{row.agent}, {row.case}")

        work = run_all(trials, backend, models=models, jobs=jobs, on_done=on_done)
        return run(work, after="every sandbox is closed")


def _list(trials: tuple[Trial, ...]) -> None:
    from swerl.cli._output import console

    agents = dict.fromkeys(trial.agent.name for trial in trials)
    cases = {trial.case.name: trial.case.sentence for trial in trials}
    table = _empty_table("case", "what happens")
    for name, sentence in cases.items():
        table.add_row(name, sentence)
    console().print(table)
    console().print(f"agents: {', '.join(agents)}", soft_wrap=True)


def _table(rows: list[TrialResult]) -> Table:
    from swerl.checks.compat.report import HEADINGS, cells

    table = _empty_table(*HEADINGS)
    table.title = f"family {rows[0].family}"
    for row in rows:
        agent, case, end, *numbers = cells(row)
        table.add_row(agent, case, f"[{_COLOURS.get(end, 'dim')}]{end}[/]", *numbers)
    return table


def _print_reasons(found: TrialResults) -> None:
    """Print why trials failed or were impossible, and what agents tried to reach outside."""
    from swerl.checks.compat.report import attempts, reasons
    from swerl.cli._output import console

    console().print()
    for line in (*reasons(found.rows), *attempts(found.rows)):
        console().print(line, markup=False, soft_wrap=True)
    for row in found.failed:
        if row.log:
            title = f"{row.agent}, {row.case}, {row.family} ended with:"
            console().print(f"{title}\n{row.log[-_LOG_CHARS:]}", markup=False, style="dim")


def _empty_table(*names: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_edge=False, pad_edge=False, padding=0, title_justify="left")
    for name in names:
        head = _NARROW.get(name, name)
        table.add_column(head, no_wrap=name in ("agent", "case", "end"), overflow="fold")
    return table
