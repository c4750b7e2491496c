"""`swerl convert`: a public dataset's rows become Tasks, and Tasks another trainer's format."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import ForceOption, JsonOption, PushOption, require_new
from swerl.cli._output import console, counted, print_json, safe, simple_table, stderr
from swerl.cli._run import INTERRUPTED, progress_bar, waiting
from swerl.core.errors import InputError, TaskError, unknown
from swerl.core.task import read_tasks
from swerl.grading.log_parsers import unsupported
from swerl.recipe import hub
from swerl.tasks import convert as converting
from swerl.tasks import datasets, select
from swerl.tasks.convert import Settings, Summary
from swerl.tasks.datasets import Converter
from swerl.tasks.export import FORMATS, task_card
from swerl.tasks.rows import Rows, file_rows, hub_rows, splits_in

_NUM_REASONS = 20
_ROWS_PER_UPDATE = 100
"""Rows between updates of the progress bar: an update costs as much as a row."""


def convert(
    name: Annotated[
        str,
        typer.Argument(help="Dataset, or a task file for --format; `list` prints all datasets."),
    ],
    *,
    rows: Annotated[
        Path | None,
        typer.Option(help="JSONL, Parquet, a folder of those or of tasks; the hub by default."),
    ] = None,
    repo_id: Annotated[
        str, typer.Option(help="Hub id to read instead of the dataset's main one.")
    ] = "",
    split: Annotated[
        str, typer.Option(help="Split on the hub or in a folder; the main one by default.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write; tasks.jsonl by default."),
    ] = None,
    assets: Annotated[
        Path | None, typer.Option(help="Folder with data that the rows lack (swe-bench-pro).")
    ] = None,
    to: Annotated[
        str,
        typer.Option("--format", help="slime or verl-parquet: another trainer's format."),
    ] = "",
    push: PushOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a dataset's rows to Tasks; unusable rows go to a rejects file.

    With --format, write the tasks of a dataset or of a task file for another trainer; those of a
    dataset are kept beside the result. With --push, upload them to the hub with a card.
    """
    if name == "list":
        _list(as_json=as_json)
        return
    _check_output_options(to, push, out, force=force)
    if push and name.endswith(".jsonl"):
        _push(Path(name), push)
        return
    if to and name.endswith(".jsonl"):
        _export(Path(name), out or Path(), to, as_json=as_json)
        return
    tasks = out or Path("tasks.jsonl")
    if to:
        tasks = tasks.with_name(f"{tasks.stem}.tasks.jsonl")
    converter, settings = datasets.find_converter(name), Settings(_assets(assets))
    source = _rows(converter, rows, repo_id, split)
    _check_output(tasks, rows, force=force)
    summary = _convert(converter, source, tasks, settings)
    _print(summary, tasks, as_json=as_json)
    if push:
        _push(tasks, push)
    if out and to:
        _export(tasks, out, to)


def _push(tasks: Path, name: str) -> None:
    """Upload a task file with a card that states how its Tasks were made."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "README.md").write_text(task_card(list(read_tasks(tasks))))
        shutil.copyfile(tasks, Path(folder) / "tasks.jsonl")
        with waiting(f"uploading to {name}"):
            address = hub.push(Path(folder), name, kind="dataset")
    console().print(f"hub:     {address}", soft_wrap=True)


def _convert(converter: Converter, rows: Rows, tasks: Path, settings: Settings) -> Summary:
    """Convert with a progress bar."""
    try:
        with progress_bar("rows", None) as advance:

            def report(num_rows: int) -> None:
                if num_rows % _ROWS_PER_UPDATE == 0:
                    advance(completed=num_rows)

            return converting.convert(converter, rows, tasks, settings=settings, report=report)
    except KeyboardInterrupt:
        stderr().print(f"[yellow]interrupted[/]: {tasks} was not written")
        raise typer.Exit(INTERRUPTED) from None


def _list(*, as_json: bool) -> None:
    converters = {name: datasets.find_converter(name) for name in datasets.converter_names()}
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "source": converter.source,
                    "also": converter.also,
                    "splits": converter.splits,
                }
                for name, converter in converters.items()
            ]
        )
        return
    table = simple_table("dataset", "hub id", "splits", whole=("dataset", "hub id"))
    for name, converter in converters.items():
        table.add_row(name, converter.source or "(task folders)", ", ".join(converter.splits))
        for repo_id in converter.also:
            table.add_row("", repo_id, "")
    console().print(table)
    console().print("next: swerl convert DATASET --repo-id HUB_ID, or --rows FILE")


def _check_output_options(to: str, push: str | None, out: Path | None, *, force: bool) -> None:
    """Raise UnknownNameError on an unknown format, InputError on an unusable output."""
    if push:
        hub.require_id(push)
    if push and to:
        raise InputError("--push uploads swerl's own form", hint="leave out --format")
    if not to:
        return
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    if out is None:
        raise InputError(f"--format {to} needs the name of its file", hint="pass it with -o")
    require_new(out, force=force)


def _assets(folder: Path | None) -> Path | None:
    if folder and not folder.is_dir():
        raise InputError(
            f"--assets {folder} is not a folder",
            hint="pass a checkout of the benchmark's repository",
        )
    return folder


def _rows(converter: Converter, rows: Path | None, repo_id: str, split: str) -> Rows:
    if rows is not None:
        if repo_id:
            raise InputError("--rows names a file, --repo-id the hub", hint="pass one of them")
        if rows.is_dir() and not split and len(splits := splits_in(rows)) > 1:
            raise InputError(
                f"folder {rows} has the splits {', '.join(splits)}",
                hint="choose one with --split, so that training and test tasks stay apart",
            )
        return file_rows(rows, split=split)
    repo_id = repo_id or converter.source
    if not repo_id:
        raise InputError(
            f"{converter.name} has no dataset on the hub",
            hint="pass --rows with a folder of tasks",
        )
    if converter.files and split:
        raise InputError(f"the files of {converter.name} have no splits", hint="remove --split")
    return hub_rows(repo_id, split or converter.splits[0], files=converter.files)


def _check_output(tasks: Path, rows: Path | None, *, force: bool) -> None:
    """Raise InputError if a conversion would replace a file, or one of its inputs."""
    if rows and tasks.exists() and rows.resolve() in (tasks.resolve(), *tasks.resolve().parents):
        raise InputError(f"{tasks} is one of the input files", hint="pass -o with another file")
    require_new(tasks, force=force)


def _print(summary: Summary, tasks: Path, *, as_json: bool) -> None:
    """Print the counts of a conversion. Raises TaskError if no row became a Task."""
    rejects = converting.rejects_path(tasks)
    if as_json:
        print_json(
            {
                "num_tasks": summary.num_tasks,
                "num_rejects": summary.num_rejects,
                "reasons": summary.reasons,
                "missing": unsupported(summary.kinds),
                "warnings": summary.warnings,
                "tasks": tasks if summary.num_tasks else None,
                "rejects": rejects if summary.num_rejects else None,
            }
        )
    table = simple_table("rows", "result", numbers={"rows"})
    table.add_row(f"{summary.num_tasks:,}", "tasks")
    for gap, count in (unsupported(summary.kinds) | summary.warnings).items():
        table.add_row(f"[yellow]{count:,}[/]", f"of them: {safe(gap)}")
    reasons = summary.reasons.most_common()
    for reason, count in reasons[:_NUM_REASONS]:
        table.add_row(f"[red]{count:,}[/]", f"rejected: {safe(reason)}")
    if rest := reasons[_NUM_REASONS:]:
        total = sum(count for _, count in rest)
        table.add_row(f"[red]{total:,}[/]", f"rejected: {counted(len(rest), 'more reason')}")
    console().print(table)
    if summary.num_rejects:
        console().print(f"rejects: {rejects}", soft_wrap=True)
    if summary.num_tasks:
        console().print(f"tasks:   {tasks}", soft_wrap=True)
        console().print(f"next: swerl tasks show {tasks}", soft_wrap=True)
        return
    hint = "there are no rows: is it the right file or split?"
    if summary.num_rejects:
        hint = f"the reasons are in {rejects}"
    raise TaskError("no row could be converted", hint=hint)


def _export(tasks: Path, out: Path, to: str, *, as_json: bool = False) -> None:
    """Write a task file in a format and print the result. Raises TaskError if it is empty."""
    if out.resolve() == tasks.resolve():
        raise InputError(
            f"{out} is the task file itself, and {to} loses some of its fields",
            hint="pass -o with another file",
        )
    exported = FORMATS[to]((task for _, task in select.lines(tasks)), out)
    for reason, number in exported.reasons.items():
        stderr().print(
            f"[yellow]{counted(number, 'task')}[/] left out: {safe(reason)}", soft_wrap=True
        )
    if not exported.num_tasks:
        raise TaskError(
            f"no task of {tasks} could be written for {to}",
            hint="the reasons are printed above" if exported.reasons else "the file is empty",
        )
    if as_json:
        counts = {"num_tasks": exported.num_tasks, "left_out": exported.reasons}
        print_json({"file": out, "format": to, **counts})
    console().print(f"{counted(exported.num_tasks, 'task')}: {out}", soft_wrap=True)
