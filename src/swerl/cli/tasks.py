"""`swerl tasks`: wires its commands; `sweep` is here, the others have files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli import tasks_export, tasks_probe, tasks_redteam, tasks_select, tasks_show, tasks_vet
from swerl.cli._sandbox_options import BackendOption, SettingsOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from swerl.checks.scan_leaks import Sweep
    from swerl.checks.scan_leaks_tasks import Settings, Swept
    from swerl.tasks.hide_future import History

app = typer.Typer(no_args_is_help=True, help="Look into the tasks of a file, and choose some.")

app.command("show")(tasks_show.show)
app.command("stats")(tasks_show.stats)
app.command("export")(tasks_export.export)
app.command("filter")(tasks_select.filter_tasks)
app.command("sample")(tasks_select.sample)
app.command("split")(tasks_select.split)
app.command("vet")(tasks_vet.vet)
app.command("probe")(tasks_probe.probe)
app.command("redteam")(tasks_redteam.redteam)


@app.callback()
def _tasks() -> None:
    """Look into the tasks of a file, and choose some."""


@app.command("sweep")
def sweep(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes at once.")] = 4,
    raw: Annotated[
        bool | None, typer.Option("--raw/--scrubbed", help="Only one of the two sweeps.")
    ] = None,
    history: Annotated[str, typer.Option(help="What a scrub keeps: auto, full or none.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Append each result to this file; the same command goes on from it."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Find what an image tells of the solution, as it is and as an agent gets it."""
    import json

    from swerl.checks import scan_leaks_tasks as sweep_tasks
    from swerl.cli._output import console, stderr

    chosen = sweep_tasks.Settings(
        raw=raw is not False,
        scrubbed=raw is not True,
        history=_history(history),
        num_workers=workers,
        done=sweep_tasks.read(out) if out else {},
    )
    results = _run(tasks, backend, settings or [], chosen, out)
    if as_json:
        typer.echo(json.dumps([sweep_tasks.as_row(result) for result in results], indent=2))
    else:
        console().print(_table(results))
        for line in _details(results):
            console().print(line, markup=False, soft_wrap=True)
    if out:
        stderr().print(f"results: {out}", soft_wrap=True, markup=False)
    bad = [result for result in results if not result.ok]
    if bad:
        stderr().print(f"{len(bad)} of {len(results)} tasks leak after the scrub, or failed")
        raise typer.Exit(1)
    if chosen.scrubbed:
        stderr().print(f"an agent finds nothing in {len(results)} tasks")


def _history(name: str) -> History:
    from swerl.core.errors import unknown
    from swerl.tasks.hide_future import History

    if name not in set(History):
        raise unknown("history", name, list(History))
    return History(name)


def _run(
    tasks: Path, backend: str, settings: Sequence[str], chosen: Settings, out: Path | None
) -> list[Swept]:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from swerl.checks import scan_leaks_tasks as sweep_tasks
    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.cli._sandbox_options import open_backend
    from swerl.cli._task_file import tasks_in

    found = tasks_in(tasks)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        bar = progress.add_task("tasks", total=len(found))

        def heard(result: Swept, is_new: bool) -> None:
            progress.advance(bar)
            if out and is_new:
                sweep_tasks.append(out, result)

        sandboxes = open_backend(backend, settings, run="sweep")
        work = sweep_tasks.sweep_tasks(sandboxes, found, chosen, tell=heard)
        after = "every sandbox is closed" + (f", and {out} keeps the rest" if out else "")
        return run(work, after=after)


def _table(results: Sequence[Swept]) -> Table:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("task", "image", "raw", "scrubbed", "history", "scrub ms", "unchecked"):
        is_number = title in {"raw", "scrubbed", "scrub ms", "unchecked"}
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for each in results:
        last = each.scrubbed or each.raw
        table.add_row(
            escape(each.task),
            escape(each.image),
            _count(each.raw, "yellow"),
            "[red]failed[/]" if each.failure else _count(each.scrubbed, "red"),
            each.history,
            f"{each.scrub_s * 1e3:.0f}" if each.scrubbed else "",
            str(len(last.unchecked)) if last and last.unchecked else "",
        )
    return table


def _count(sweep: Sweep | None, colour: str) -> str:
    if sweep is None:
        return "-"
    number = len(sweep.leaks)
    return f"[{colour}]{number}[/]" if number else "0"


def _details(results: Sequence[Swept]) -> list[str]:
    """Return a line for each failure, leak and thing unchecked of the last sweep of each Task."""
    lines = []
    for each in results:
        if each.failure:
            lines.append(f"{each.task}: {each.failure}")
        for name, sweep in (("raw", each.raw), ("scrubbed", each.scrubbed)):
            for leak in sweep.leaks if sweep else ():
                lines.append(f"{each.task} {name}: {leak.kind} {leak.name}: {leak.reason}")
                if leak.evidence:
                    lines.append(f"    {leak.evidence}")
        last = each.scrubbed or each.raw
        lines += [f"{each.task} unchecked: {reason}" for reason in (last.unchecked if last else ())]
    return lines
