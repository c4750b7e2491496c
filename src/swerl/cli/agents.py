"""`swerl agents`: fetch agent CLIs for sandboxes, and test them offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.box import SIMPLE
from rich.table import Table

from swerl.checks.compat import report
from swerl.checks.compat.cases import CASES, choose_agents, find_case
from swerl.checks.compat.report import HEADINGS, attempts, cells, reasons
from swerl.checks.compat.trial import Trial, TrialResult, TrialResults, plan, run_all
from swerl.cli._options import ForceOption, JsonOption, require_new
from swerl.cli._output import console, counted, print_json
from swerl.cli._run import progress_bar, run, waiting
from swerl.core import plugins
from swerl.core.errors import InputError
from swerl.rollout.wiring import open_backend
from swerl.sandboxes import local

_NARROW = {
    "branches": "bran-\nches",
    "samples": "sam-\nples",
    "trained": "trai-\nned",
    "outside": "out-\nside",
}
"""Headings in two lines: the table fits into 80 columns."""
_COLOURS = {"done": "green", "limit": "green", "gave up": "yellow", "failed": "bold red"}
_LOG_CHARS = 400
_WANTED_SHARE = 0.99
"""Share of all turns that must replay."""


def compat(
    *,
    agents: Annotated[
        str, typer.Option(help="Agents, separated by commas: codex, codex@0.94.0. All by default.")
    ] = "",
    cases: Annotated[str, typer.Option(help="Cases, separated by commas. All by default.")] = "",
    families: Annotated[
        str,
        typer.Option(help="Families; the first one with every agent, others with the first agent."),
    ] = "tiny",
    models: Annotated[
        Path | None,
        typer.Option(help="Folder of model folders (tokenizer, chat template) named by family."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Every family with every agent.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at the same time.")] = 1,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the report here: .md or .json.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List agents and cases; run none.")] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run agents offline against a scripted model; exit code 1 if one fails."""
    if out:
        report.check(out)
        require_new(out, force=force)
    if models and not models.is_dir():
        raise InputError(
            f"there is no folder {models}",
            hint="give a folder with one model folder per family",
        )
    trials = _trials(agents, cases, families, full=full)
    if show:
        _list(trials, as_json=as_json)
        return
    found = _run(trials, models, jobs)
    if as_json:
        print_json(report.as_row(found))
    else:
        for family in dict.fromkeys(row.family for row in found.rows):
            console().print(_table([row for row in found.rows if row.family == family]))
        _print_reasons(found)
    if out:
        report.write(found, out)
        console().print(f"report: {out}", soft_wrap=True, markup=False)
    console().print(
        f"{counted(len(found.rows), 'trial')}, {len(found.failed)} failed, {found.seconds:.0f} s"
    )
    if found.failed:
        raise typer.Exit(1)


def replay(
    *,
    agents: Annotated[str, typer.Option(help="As for `compat`.")] = "",
    cases: Annotated[str, typer.Option(help="As for `compat`.")] = "",
    family: Annotated[str, typer.Option(help="The family of the scripted model.")] = "tiny",
    models: Annotated[Path | None, typer.Option(help="As for `compat`.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at the same time.")] = 1,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the report here: .md or .json.")
    ] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Play each case, and again from its record; exit code 1 under 99 % of the turns."""
    if out:
        report.check(out)
        require_new(out, force=force)
    found = _run(_trials(agents, cases, family, full=False), models, jobs, replay=True)
    table = _empty_table(*report.REPLAY_HEADINGS)
    for row in report.replay_cells(found.rows):
        table.add_row(*row)
    if as_json:
        print_json(report.as_row(found))
    console().print(table)
    _print_reasons(found)
    if out:
        report.write(found, out, replays=True)
        console().print(f"report: {out}", soft_wrap=True, markup=False)
    console().print(f"{report.replay_summary(found.rows)} {found.seconds:.0f} s")
    if report.replayed_share(found.rows) < _WANTED_SHARE or found.failed:
        raise typer.Exit(1)


def _trials(agents: str, cases: str, families: str, *, full: bool) -> tuple[Trial, ...]:
    names = _split(families)
    for name in names:
        plugins.load("families", name)
    chosen = [find_case(name) for name in _split(cases) or tuple(CASES)]
    return plan(choose_agents(_split(agents)), chosen, names, full=full)


def _split(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def _run(
    trials: tuple[Trial, ...], models: Path | None, jobs: int, *, replay: bool = False
) -> TrialResults:
    backend = open_backend("local", local.Options(), run="compat")
    with progress_bar("trials", len(trials)) as advance:

        def on_done(row: TrialResult) -> None:
            advance(description=f"{row.agent}, {row.case}")

        work = run_all(trials, backend, models=models, jobs=jobs, replay=replay, on_done=on_done)
        return run(work, after="every sandbox is closed")


def _list(trials: tuple[Trial, ...], *, as_json: bool) -> None:
    agents = dict.fromkeys(trial.agent.name for trial in trials)
    cases = {trial.case.name: trial.case.sentence for trial in trials}
    if as_json:
        print_json({"agents": list(agents), "cases": cases})
        return
    table = _empty_table("case", "what happens")
    for name, sentence in cases.items():
        table.add_row(name, sentence)
    console().print(table)
    console().print(f"agents: {', '.join(agents)}", soft_wrap=True)


def _table(rows: list[TrialResult]) -> Table:
    table = _empty_table(*HEADINGS)
    table.title = f"family {rows[0].family}"
    for row in rows:
        agent, case, end, *numbers = cells(row)
        table.add_row(agent, case, f"[{_COLOURS.get(end, 'dim')}]{end}[/]", *numbers)
    return table


def _print_reasons(found: TrialResults) -> None:
    """Print why trials failed or were impossible, and contact attempts to the outside."""
    console().print()
    for line in (*reasons(found.rows), *attempts(found.rows)):
        console().print(line, markup=False, soft_wrap=True)
    for row in found.failed:
        if row.log:
            title = f"{row.agent}, {row.case}, {row.family} ended with:"
            console().print(f"{title}\n{row.log[-_LOG_CHARS:]}", markup=False, style="dim")


def _empty_table(*names: str) -> Table:
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False, padding=0, title_justify="left")
    for name in names:
        head = _NARROW.get(name, name)
        table.add_column(head, no_wrap=name in ("agent", "case", "end"), overflow="fold")
    return table


def fetch(
    agent: Annotated[str, typer.Argument(help="An agent, such as claude-code.")],
    version: Annotated[
        str | None, typer.Option(help="Exact release; the tested one by default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Download an agent's CLI into the cache, once."""
    module = plugins.load("harnesses", agent)
    if not hasattr(module, "fetch"):
        console().print(f"{agent} is part of swerl; there is nothing to fetch")
        if as_json:
            print_json({"agent": agent, "version": None, "mounts": []})
        return
    release = _release(agent, module, version)
    with waiting(f"downloading {agent} {release}"):
        mounts = module.fetch(release)
    if as_json:
        shown = [{"target": mount.target, "source": mount.source} for mount in mounts]
        print_json({"agent": agent, "version": release, "mounts": shown})
        return
    for mount in mounts:
        console().print(f"{mount.target}  [dim]from[/] {mount.source}", soft_wrap=True)
    # A release that is not the tested one must be named again.
    own = f" --set harness.version={version}" if version else ""
    console().print(f"next: swerl rollout --agent {agent}{own} --engine scripted:gold")


def _release(agent: str, module: Any, version: str | None) -> str:
    """Return the release to fetch. Raises InputError if the agent's settings refuse it."""
    default: str = module.DEFAULT_VERSION
    try:
        module.Options(version=version or default)
    except ValidationError as error:
        message = f"--version {version!r} is not a release of {agent}"
        if (why := error.errors()[0])["type"] == "value_error":
            message = f"{agent} cannot be run here: {why['ctx']['error']}"
        raise InputError(message, hint=f"give the exact version, such as {default}") from error
    return version or default
