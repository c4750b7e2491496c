"""`swerl convert`: convert a public dataset's rows to Tasks; `swerl tasks export`: back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from swerl.cli._options import ForceOption, JsonOption, require_new
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import INTERRUPTED, progress_bar
from swerl.cli.tasks_select import TasksArgument
from swerl.core.errors import InputError, TaskError, unknown
from swerl.grading.log_parsers import unsupported
from swerl.images.mirror import LockFile
from swerl.tasks import convert as converting
from swerl.tasks import datasets, select
from swerl.tasks.convert import Settings, Summary, is_begun
from swerl.tasks.datasets import Converter
from swerl.tasks.export import FORMATS, Exported
from swerl.tasks.hub_rows import hub_file_rows, hub_rows
from swerl.tasks.rows import RowSource, file_rows, splits_in

_NUM_REASONS = 20
_TELL_EVERY = 100
"""Rows between updates of the progress bar: an update costs as much as a row."""


def convert(
    name: Annotated[str, typer.Argument(help="Dataset; `swerl convert list` prints all.")],
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
    lock: Annotated[
        Path | None, typer.Option(help="Lock file of a mirror: use its images, by digest.")
    ] = None,
    assets: Annotated[
        Path | None, typer.Option(help="Folder with data that the rows lack (swe-bench-pro).")
    ] = None,
    to: Annotated[
        str,
        typer.Option("--format", help="slime, harbor or verl-parquet: another trainer's format."),
    ] = "",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a dataset's rows to Tasks; unusable rows go to a rejects file.

    The same command resumes an interrupted conversion. With --format the tasks are kept beside the
    files for the other trainer.
    """
    if name == "list":
        _list(as_json=as_json)
        return
    tasks = _tasks_file(out, to)
    converter = datasets.find_converter(name)
    settings = _settings(lock, assets)
    source = _source(converter, rows, repo_id, split)
    _check_outputs(tasks, out, to, source, force=force)
    try:
        with _progress(source) as tell:
            summary = converting.convert(converter, source, tasks, settings=settings, tell=tell)
    except KeyboardInterrupt:
        stderr().print("[yellow]interrupted[/]: run the same command again to resume")
        raise typer.Exit(INTERRUPTED) from None
    _print(summary, tasks, converting.rejects_path(tasks), as_json=as_json)
    if out and to:
        _export_file(tasks, out, to)


def _check_outputs(tasks: Path, out: Path | None, to: str, rows: RowSource, *, force: bool) -> None:
    """Raise InputError if a conversion would replace a file that it did not write."""
    # An input file is refused even with --force, by the conversion itself.
    if not is_begun(tasks) and tasks.resolve() not in rows.files:
        require_new(tasks, force=force)
    if out and to:
        require_new(out, force=force and to != "harbor")


def _tasks_file(out: Path | None, to: str) -> Path:
    """Return the task file: `out`, or a file beside it if `out` is for another trainer.

    Raises InputError on an unusable path, UnknownNameError on an unknown format.
    """
    if not to:
        return out or Path("tasks.jsonl")
    check_format(to)
    if out is None:
        raise InputError(
            f"--format {to} writes a second file",
            hint="name it with -o; the tasks stay beside it",
        )
    return out.with_name(f"{out.stem}.tasks.jsonl")


def _list(*, as_json: bool) -> None:
    found = {name: datasets.find_converter(name) for name in datasets.converter_names()}
    if as_json:
        rows = found.items()
        print_json([{"name": n, "source": each.source, "splits": each.splits} for n, each in rows])
        return
    table = simple_table("dataset", "hub id", "splits")
    for name, converter in found.items():
        table.add_row(name, converter.source or "(task folders)", ", ".join(converter.splits))
    console().print(table)


def _settings(lock: Path | None, assets: Path | None) -> Settings:
    if assets and not assets.is_dir():
        raise InputError(
            f"--assets {assets} is not a folder",
            hint="pass a checkout of the benchmark's repository",
        )
    return Settings(_mirrored(lock) if lock else {}, assets)


def _mirrored(lock: Path) -> dict[str, str]:
    pinned = LockFile(lock).images if lock.is_file() else {}
    if not pinned:
        raise InputError(
            f"{lock} has no mirrored image", hint="`swerl images mirror` writes a lock file"
        )
    return {image: each.reference for image, each in pinned.items()}


def _source(converter: Converter, rows: Path | None, repo_id: str, split: str) -> RowSource:
    if rows is not None and repo_id:
        raise InputError("--rows names a file, --repo-id the hub", hint="pass one of them")
    if rows is not None and rows.is_dir() and not split and len(found := splits_in(rows)) > 1:
        raise InputError(
            f"folder {rows} has the splits {', '.join(found)}",
            hint="choose one with --split, so that training and test tasks stay apart",
        )
    if rows is not None:
        return file_rows(rows, split=split)
    repo_id = repo_id or converter.source
    if not repo_id:
        raise InputError(
            f"{converter.name} has no dataset on the hub",
            hint="pass --rows with a folder of tasks",
        )
    if converter.files:
        if split:
            raise InputError(f"the files of {converter.name} have no splits", hint="remove --split")
        return hub_file_rows(repo_id, converter.files)
    return hub_rows(repo_id, split or converter.splits[0])


@contextmanager
def _progress(source: RowSource) -> Iterator[Callable[[int], None]]:
    """Show a progress bar and yield the function that advances it."""
    with progress_bar("rows", source.count() if stderr().is_terminal else 0) as advance:

        def tell(num_rows: int) -> None:
            if num_rows % _TELL_EVERY == 0:
                advance(completed=num_rows)

        yield tell


def _print(summary: Summary, out: Path, rejects: Path, *, as_json: bool) -> None:
    """Print the counts of a conversion. Raises TaskError if no row became a Task."""
    if as_json:
        found = {
            "num_tasks": summary.num_tasks,
            "num_rejects": summary.num_rejects,
            "num_resumed": summary.num_resumed,
            "reasons": summary.reasons,
            "missing": unsupported(summary.kinds),
            "tasks": out if summary.num_tasks else None,
            "rejects": rejects if summary.num_rejects else None,
        }
        print_json(found)

    table = simple_table("rows", "came to")
    table.columns[0].justify = "right"
    table.add_row(f"{summary.num_tasks:,}", "tasks")
    for note, count in unsupported(summary.kinds).items():
        table.add_row(f"[yellow]{count:,}[/]", f"of them: {escape(note)}")
    reasons = list(summary.reasons.items())
    for reason, count in reasons[:_NUM_REASONS]:
        table.add_row(f"[red]{count:,}[/]", f"rejected: {escape(reason)}")
    if more := reasons[_NUM_REASONS:]:
        rest = sum(count for _, count in more)
        table.add_row(f"[red]{rest:,}[/]", f"rejected: {counted(len(more), 'more reason')}")
    console().print(table)
    if summary.num_resumed:
        console().print(f"{counted(summary.num_resumed, 'row')} done by an earlier run")
    if summary.num_rejects:
        console().print(f"rejects: {rejects}", soft_wrap=True)
    if summary.num_tasks:
        console().print(f"tasks:   {out}", soft_wrap=True)
        console().print(f"next: swerl tasks stats {out}", soft_wrap=True)
        return
    hint = "there are no rows: is it the right file or split?"
    if summary.num_rejects:
        hint = f"the reasons are in {rejects}"
    raise TaskError("no row could be converted", hint=hint)


def export(
    tasks: TasksArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="File or folder to write.")],
    *,
    to: Annotated[str, typer.Option("--format", help="slime, harbor or verl-parquet.")],
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write tasks in another trainer's format."""
    check_format(to)
    if out.resolve() != tasks.resolve():
        require_new(out, force=force and to != "harbor")
    done = _export_file(tasks, out, to)
    if as_json:
        print_json(
            {"file": out, "format": to, "num_tasks": done.num_tasks, "left_out": done.reasons}
        )


def check_format(to: str) -> None:
    """Raise UnknownNameError on an unknown format."""
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)


def _export_file(tasks: Path, out: Path, to: str) -> Exported:
    """Write a task file in a format and print the result. Raises TaskError if it is empty."""
    if out.resolve() == tasks.resolve():
        raise InputError(
            f"{out} is the task file itself, and {to} loses some of its fields",
            hint="pass -o with another file",
        )
    done = FORMATS[to]((task for _, task in select.lines(tasks)), out)
    for reason, number in done.reasons.items():
        text = f"[yellow]{counted(number, 'task')}[/] left out: {escape(reason)}"
        stderr().print(text, soft_wrap=True)
    if not done.num_tasks:
        raise TaskError(
            f"no task of {tasks} could be written for {to}",
            hint="the reasons stand above" if done.reasons else "it is empty",
        )
    console().print(f"{counted(done.num_tasks, 'task')}: {out}", soft_wrap=True)
    return done
