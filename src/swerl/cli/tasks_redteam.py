"""`swerl tasks redteam`: run cheating policies against grading, and print what stopped them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swerl.checks.redteam import runner
from swerl.checks.redteam.policy import Policy
from swerl.checks.redteam.runner import PolicyOutcome, PolicyResult, RedteamReport, RedteamSettings
from swerl.cli._options import BackendOption, JsonOption, SettingsOption, open_backend
from swerl.cli._output import console, print_json, simple_table
from swerl.cli._run import progress_bar, run

_COLOURS = {"held": "green", "BROKE": "bold red", "skipped": "yellow"}
_WHOLE = ("policy", "result", "verdict")


def redteam(
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    image: Annotated[
        str,
        typer.Option(help="Image of the sandboxes; needs git and python3, best with pytest."),
    ] = "host",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this policy; may be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 4,
    naive: Annotated[
        bool, typer.Option("--naive", help="Also grade each policy without defences.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder for the Episodes; `swerl view` reads it."),
    ] = None,
    as_json: JsonOption = False,
    show: Annotated[bool, typer.Option("--list", help="List the policies and run none.")] = False,
) -> None:
    """Run cheating policies through whole Episodes; exit code 1 if one is rewarded."""
    policies = runner.choose(only or ())
    if show:
        if as_json:
            print_json([{"name": each.name, "sentence": each.sentence} for each in policies])
        else:
            _list(policies)
        return
    chosen = RedteamSettings(backend, image, num_jobs=jobs, naively=naive, out=out)
    sandboxes = open_backend(backend, settings, run="redteam")
    with progress_bar("policies", len(policies)) as advance:
        work = runner.run(sandboxes, policies, chosen, on_done=lambda _: advance())
        report = run(work, after="every sandbox is closed")
    if as_json:
        print_json(report.to_json())
    else:
        console().print(_table(report, naive=naive))
    console().print(_summary(report), soft_wrap=True)
    if out:
        console().print(f"episodes: {out}; next: swerl view {out}", soft_wrap=True, markup=False)
    if report.counts[PolicyOutcome.BROKE]:
        raise typer.Exit(1)


def _list(policies: list[Policy]) -> None:
    table = simple_table("policy", "what it tries", "verdict", "what stops it", whole=_WHOLE)
    for policy in policies:
        table.add_row(policy.name, policy.sentence, policy.verdict.value, policy.stopped_by.value)
    console().print(table)


def _table(report: RedteamReport, *, naive: bool) -> Table:
    titles = ["policy", "what it tries", "result", "verdict", "reward", "what stopped it"]
    table = simple_table(*titles, *(["without defences"] if naive else []), whole=_WHOLE)
    for row in report.rows:
        table.add_row(*_cells(row), *([_naively(row)] if naive else []))
    return table


def _cells(row: PolicyResult) -> list[str]:
    colour = f"[{_COLOURS[row.outcome.value]}]{row.outcome.value}[/]"
    reward = f"{row.reward:g}" if row.verdict else ""
    stopped = row.seen if row.outcome != "held" else row.vetting or row.policy.stopped_by.value
    sentence = escape(row.policy.sentence)
    return [row.policy.name, sentence, colour, row.verdict, reward, escape(stopped)]


def _naively(row: PolicyResult) -> str:
    if row.policy.harmless:
        return row.policy.harmless
    return {True: "rewarded", False: "[yellow]not rewarded[/]", None: ""}[row.rewarded_naively]


def _summary(report: RedteamReport) -> str:
    counts = ", ".join(f"{count} {result.value}" for result, count in report.counts.items())
    num_vetted = sum(bool(row.vetting) and row.outcome == "held" for row in report.rows)
    counts = counts.replace(" held", f" held ({num_vetted} by vetting)", bool(num_vetted))
    return f"{report.backend}, image {report.image}: {counts} in {report.duration_s:.1f} s"
