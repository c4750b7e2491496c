"""`swerl tasks redteam`: let cheating policies loose on grading, and print what stopped them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli._sandbox_options import BackendOption, SettingsOption

if TYPE_CHECKING:
    from rich.table import Table

    from swerl.checks.redteam.policy import Policy
    from swerl.checks.redteam.sheet import Row, Settings, Sheet

_COLOURS = {"held": "green", "BROKE": "bold red", "skipped": "yellow"}


def redteam(
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    image: Annotated[
        str, typer.Option(help="Image of the sandboxes: with git, python3, and best with pytest.")
    ] = "host",
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this policy; may be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 4,
    naive: Annotated[
        bool, typer.Option("--naive", help="Also say whether a grader without defences pays.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the policies and run none.")] = False,
) -> None:
    """Run cheating policies through whole Episodes; exit code 1 where one is rewarded."""
    import json

    from swerl.checks.redteam import catalogue
    from swerl.checks.redteam.sheet import Result, Settings
    from swerl.cli._output import console, stderr

    policies = catalogue.choose(only or ())
    if show:
        _list(policies)
        return
    chosen = Settings(backend, image, num_jobs=jobs, naively=naive)
    sheet = _run(backend, settings, policies, chosen)
    if as_json:
        typer.echo(json.dumps(sheet.to_json(), indent=1, ensure_ascii=False))
    else:
        console().print(_table(sheet, naive=naive))
    (stderr() if as_json else console()).print(_summary(sheet), soft_wrap=True)
    if sheet.counts[Result.BROKE]:
        raise typer.Exit(1)


def _run(
    backend: str, settings: list[str] | None, policies: list[Policy], chosen: Settings
) -> Sheet:
    from rich.progress import MofNCompleteColumn, Progress

    from swerl.checks.redteam import sheet
    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.cli._sandbox_options import open_backend

    sandboxes = open_backend(backend, settings, run="redteam")
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        bar = progress.add_task("policies", total=len(policies))
        work = sheet.run(sandboxes, policies, chosen, tell=lambda _: progress.advance(bar))
        return run(work, after="every sandbox is closed")


def _list(policies: list[Policy]) -> None:
    from swerl.cli._output import console

    table = _empty_table("policy", "what it tries", "verdict", "what stops it")
    for policy in policies:
        table.add_row(policy.name, policy.sentence, policy.verdict.value, policy.stop.value)
    console().print(table)


def _table(sheet: Sheet, *, naive: bool) -> Table:
    titles = ["policy", "what it tries", "result", "verdict", "reward", "what stopped it"]
    table = _empty_table(*titles, *(["without defences"] if naive else []))
    for row in sheet.rows:
        table.add_row(*_cells(row), *([_naively(row)] if naive else []))
    return table


def _cells(row: Row) -> list[str]:
    from rich.markup import escape

    colour = f"[{_COLOURS[row.result.value]}]{row.result.value}[/]"
    reward = f"{row.reward:g}" if row.verdict else ""
    stopped = row.policy.stop.value if row.result == "held" else row.seen
    sentence = escape(row.policy.sentence)
    return [row.policy.name, sentence, colour, row.verdict, reward, escape(stopped)]


def _naively(row: Row) -> str:
    if row.policy.harmless:
        return row.policy.harmless
    return {True: "rewarded", False: "[yellow]not rewarded[/]", None: ""}[row.rewarded_naively]


def _summary(sheet: Sheet) -> str:
    counts = ", ".join(f"{count} {result.value}" for result, count in sheet.counts.items())
    return f"{sheet.backend}, image {sheet.image}: {counts} in {sheet.duration_s:.1f} s"


def _empty_table(*names: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name in ("policy", "result", "verdict"), overflow="fold")
    return table
