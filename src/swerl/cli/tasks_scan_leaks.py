"""`swerl tasks scan-leaks`: find leaked solutions in task images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swerl.checks import scan_leaks as leaks
from swerl.checks.scan_leaks import LeakScan, ScanSettings, TaskScan
from swerl.cli._options import BackendOption, JsonOption, SettingsOption, open_backend, tasks_in
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.core.errors import unknown
from swerl.tasks.hide_future import History


def scan_leaks(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
    raw: Annotated[
        bool | None, typer.Option("--raw/--for-agent", help="Only one of the two scans.")
    ] = None,
    history: Annotated[
        str, typer.Option(help="Git history that an agent keeps: auto, full or none.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Append each result to this file; the same command resumes from it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find leaked solutions in task images, before and after the future is hidden.

    Exit code 1 if an agent would find one, or if a scan failed.
    """
    chosen = leaks.ScanSettings(
        raw=raw is not False,
        for_agent=raw is not True,
        history=_history(history),
        num_workers=workers,
        done=leaks.read(out) if out else {},
    )
    results = _run(tasks, backend, settings or [], chosen, out)
    if as_json:
        print_json([leaks.as_row(result) for result in results])
    else:
        console().print(_table(results))
        for line in _details(results):
            console().print(line, markup=False, soft_wrap=True)
    if out:
        stderr().print(f"results: {out}", soft_wrap=True, markup=False)
    bad = [result for result in results if not result.ok]
    if bad:
        stderr().print(
            f"{len(bad)} of {counted(len(results), 'task')} still leak to an agent, or failed"
        )
        raise typer.Exit(1)
    if chosen.for_agent:
        stderr().print(f"an agent finds nothing in {counted(len(results), 'task')}")


def _history(name: str) -> History:
    if name not in set(History):
        raise unknown("history", name, list(History))
    return History(name)


def _run(
    tasks: Path, backend: str, settings: Sequence[str], chosen: ScanSettings, out: Path | None
) -> list[TaskScan]:
    found = tasks_in(tasks)
    with progress_bar("tasks", len(found)) as advance:

        def on_done(result: TaskScan, is_new: bool) -> None:
            advance()
            if out and is_new:
                leaks.append(out, result)

        sandboxes = open_backend(backend, settings, run="scan-leaks")
        work = leaks.scan_tasks(sandboxes, found, chosen, on_done=on_done)
        after = "every sandbox is closed" + (f", and {out} keeps the rest" if out else "")
        return run(work, after=after)


def _table(results: Sequence[TaskScan]) -> Table:
    titles = ("task", "image", "raw", "for agent", "history", "hide ms", "unchecked")
    table = simple_table(*titles, numbers={"raw", "for agent", "hide ms", "unchecked"})
    for each in results:
        last = each.for_agent or each.raw
        table.add_row(
            escape(each.task),
            escape(each.image),
            _count(each.raw, "yellow"),
            "[red]failed[/]" if each.failure else _count(each.for_agent, "red"),
            each.history,
            f"{each.hide_s * 1e3:.0f}" if each.for_agent else "",
            str(len(last.unchecked)) if last and last.unchecked else "",
        )
    return table


def _count(scan: LeakScan | None, colour: str) -> str:
    if scan is None:
        return "-"
    number = len(scan.leaks)
    return f"[{colour}]{number}[/]" if number else "0"


def _details(results: Sequence[TaskScan]) -> list[str]:
    """Return a line for each failure, leak and unchecked item of the last scan of each Task."""
    lines = []
    for each in results:
        if each.failure:
            lines.append(f"{each.task}: {each.failure}")
        for name, scan in (("raw", each.raw), ("for the agent", each.for_agent)):
            for leak in scan.leaks if scan else ():
                lines.append(f"{each.task} {name}: {leak.kind} {leak.name}: {leak.reason}")
                if leak.evidence:
                    lines.append(f"    {leak.evidence}")
        last = each.for_agent or each.raw
        lines += [f"{each.task} unchecked: {reason}" for reason in (last.unchecked if last else ())]
    return lines
