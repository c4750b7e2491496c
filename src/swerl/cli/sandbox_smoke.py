"""`swerl sandbox smoke`: check that images can be worked in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli._sandbox_options import BackendOption, SettingsOption

if TYPE_CHECKING:
    from rich.table import Table

    from swerl.interfaces import SandboxBackend
    from swerl.task import Task
    from swerl.tasks.smoke import Smoke


def smoke(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes at once.")] = 4,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Boot every image of a task file, and look for its git work tree and its Python."""
    import json
    from dataclasses import asdict

    from swerl.cli._output import console, stderr
    from swerl.cli._sandbox_options import open_backend
    from swerl.task import read_tasks

    results = _check(open_backend(backend, settings), list(read_tasks(tasks)), workers)
    failed = [result for result in results if not result.ok]
    if as_json:
        typer.echo(
            json.dumps([{**asdict(result), "ok": result.ok} for result in results], indent=2)
        )
    else:
        console().print(_table(results))
        for result in failed:
            console().print(f"{result.image}: {result.failure}", style="red", markup=False)
    if failed:
        stderr().print(f"{len(failed)} of {len(results)} images failed")
        raise typer.Exit(1)
    hint = "; next: `swerl rollout --instance ID --tasks FILE`" if not as_json else ""
    stderr().print(f"all {len(results)} images are ready{hint}")


def _check(sandboxes: SandboxBackend, tasks: list[Task], workers: int) -> list[Smoke]:
    from rich.progress import MofNCompleteColumn, Progress

    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.tasks import smoke

    num_images = len({(task.image, task.workdir) for task in tasks})
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        bar = progress.add_task("images", total=num_images)
        checking = smoke.check(
            sandboxes, tasks, num_workers=workers, tell=lambda _: progress.advance(bar)
        )
        return run(checking, after="every sandbox is closed")


def _table(results: list[Smoke]) -> Table:
    from rich.table import Table

    table = Table("image", "tasks", "boots", "work tree", "interpreter", "boot ms", "exec ms")
    for result in results:
        boots = "[green]yes[/]" if result.ok else "[red]no[/]"
        times = (
            (f"{result.boot_s * 1e3:.0f}", f"{result.exec_s * 1e3:.1f}") if result.ok else ("", "")
        )
        table.add_row(
            result.image, str(result.num_tasks), boots, result.work_tree, result.interpreter, *times
        )
    return table
