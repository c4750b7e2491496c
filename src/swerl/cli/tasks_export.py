"""`swerl tasks export`: task files in the formats of other trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swerl.cli.tasks_select import TasksArgument


def export(
    tasks: TasksArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="File or folder to write.")],
    *,
    to: Annotated[str, typer.Option("--format", help="slime, harbor or verl-parquet.")],
) -> None:
    """Write tasks in another trainer's format."""
    check_format(to)
    export_file(tasks, out, to)


def check_format(to: str) -> None:
    """Raise UnknownNameError where no trainer's format has this name."""
    from swerl.core.errors import unknown
    from swerl.tasks.export import FORMATS

    if to not in FORMATS:
        raise unknown("format", to, FORMATS)


def export_file(tasks: Path, out: Path, to: str) -> None:
    """Write a task file in a format, and say what became of it. Raises TaskError on nothing."""
    from rich.markup import escape

    from swerl.cli._output import console, stderr
    from swerl.cli._text import counted
    from swerl.core.errors import InputError, TaskError
    from swerl.tasks import select
    from swerl.tasks.export import FORMATS

    if out.resolve() == tasks.resolve():
        raise InputError(
            f"{out} is the task file itself, and {to} does not keep all that is in it",
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
