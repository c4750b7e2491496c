"""`swerl convert`: from a public dataset's rows to Tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swerl.errors import TaskError
    from swerl.tasks.convert import Row, Summary


def convert(
    name: Annotated[str, typer.Argument(help="Dataset: swe-bench, swe-gym or r2e-gym.")],
    rows: Annotated[
        Path | None, typer.Option(help="JSONL or Parquet file of rows; the hub by default.")
    ] = None,
    repo_id: Annotated[
        str, typer.Option(help="Hub id to read in place of the dataset's main one.")
    ] = "",
    split: Annotated[str, typer.Option(help="Split on the hub; the main one by default.")] = "",
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("tasks.jsonl"),
) -> None:
    """Convert a dataset's rows to Tasks; rows that cannot be used go to a rejects file."""
    from swerl.errors import InputError, TaskError
    from swerl.tasks import convert as converting

    converter = converting.find_converter(name)
    if rows is not None and (repo_id or split):
        raise InputError("--rows names a file, --repo-id and --split the hub", hint="pass one")
    if rows is not None:
        source = converting.read_rows(rows)
    else:
        source = converting.hub_rows(repo_id or converter.source, split or converter.splits[0])
    summary = converting.convert(converter, _shown(source), out)
    _print(summary, out, converting.rejects_path(out))
    if not summary.num_tasks:
        raise TaskError("no row could be converted", hint="the reasons are in the rejects file")


def _shown(rows: Iterable[Row | TaskError]) -> Iterator[Row | TaskError]:
    """Pass rows on and show how many there were."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from swerl.cli._output import stderr

    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} rows"), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        bar = progress.add_task("rows", total=None)
        for row in rows:
            yield row
            progress.advance(bar)


def _print(summary: Summary, out: Path, rejects: Path) -> None:
    from rich.table import Table

    from swerl.cli._output import console

    if summary.num_rejects:
        table = Table("rejects", "reason", box=None)
        for reason, count in list(summary.reasons.items())[:20]:
            table.add_row(str(count), reason)
        console().print(table)
        console().print(f"{summary.num_rejects} rejects: {rejects}", soft_wrap=True)
    console().print(f"{summary.num_tasks} tasks: {out}", soft_wrap=True)
    if summary.num_tasks:
        console().print(f"next: swerl rollout --tasks {out} --instance ID", soft_wrap=True)
