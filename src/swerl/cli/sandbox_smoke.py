"""`swerl sandbox smoke`: check that images boot and that sandboxes are isolated."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swerl.checks import smoke as smoking
from swerl.checks.isolation import check_isolation
from swerl.checks.smoke import SmokeResult
from swerl.cli._options import (
    BackendOption,
    JsonOption,
    SettingsOption,
    open_backend,
    tasks_in,
)
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.core.contracts import SandboxBackend
from swerl.core.task import Task

_HOLDS = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "[yellow]not tried[/]"}


def smoke(
    tasks: Annotated[
        Path | None, typer.Argument(help="Task file written by `swerl convert`.")
    ] = None,
    *,
    isolation: Annotated[
        bool,
        typer.Option(
            "--isolation",
            help="Check one sandbox of the first image: no network, no host file, limits hold,"
            " nothing left. The default without a file, with this machine's programs.",
        ),
    ] = False,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Boot every image of a task file, and check its git work tree and its interpreter."""
    if isolation or tasks is None:
        _isolation(tasks, backend, settings or [], as_json=as_json)
        return
    results = _run(tasks_in(tasks), open_backend(backend, settings or [], run="smoke"), workers)
    failed = [result for result in results if not result.ok]
    if as_json:
        print_json([{**asdict(result), "ok": result.ok} for result in results])
    else:
        console().print(_table(results))
        for result in failed:
            line = f"{result.image} {result.workdir}: {result.failure}"
            console().print(line, style="red", markup=False, soft_wrap=True)
    if failed:
        stderr().print(f"{len(failed)} of {counted(len(results), 'image')} failed")
        raise typer.Exit(1)
    hint = "; next: `swerl rollout --instance ID --tasks FILE`" if not as_json else ""
    stderr().print(f"{counted(len(results), 'image')} ready, 0 failed{hint}")


def _isolation(tasks: Path | None, backend: str, settings: list[str], *, as_json: bool) -> None:
    """Check a backend's isolation; exit code 1 if a check fails."""
    image, workdir = "host", "/testbed"
    if tasks:
        first = tasks_in(tasks)[0]
        image, workdir = first.image, first.workdir
    sandboxes = open_backend(backend, settings, run="smoke")
    checking = check_isolation(sandboxes, image, workdir)
    findings = run(checking, after="every sandbox is closed")
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = simple_table("check", "holds", "problem", whole=("check", "holds"))
        for finding in findings:
            table.add_row(finding.check, _HOLDS[finding.ok], escape(finding.detail))
        console().print(table)
    failed = sum(finding.ok is False for finding in findings)
    stderr().print(f"{backend}, image {image}: {len(findings)} checks, {failed} failed")
    if failed:
        raise typer.Exit(1)


def _run(tasks: list[Task], sandboxes: SandboxBackend, workers: int) -> list[SmokeResult]:
    results: list[SmokeResult] = []
    with progress_bar("images", len({(task.image, task.workdir) for task in tasks})) as advance:

        def on_done(result: SmokeResult) -> None:
            advance()
            results.append(result)

        try:
            work = smoking.check(sandboxes, tasks, num_workers=workers, on_done=on_done)
            return run(work, after="every sandbox is closed")
        except typer.Exit:  # interrupted: what is done is still worth reading
            if results:
                console().print(_table(results))
            raise


def _table(results: list[SmokeResult]) -> Table:
    titles = ("image", "tasks", "ready", "work tree", "interpreter", "boot ms", "exec ms")
    table = simple_table(*titles, numbers={"tasks", "boot ms", "exec ms"})
    for result in results:
        has_booted = result.boot_s > 0
        times = (
            (f"{result.boot_s * 1e3:.0f}", f"{result.exec_s * 1e3:.1f}") if has_booted else ("", "")
        )
        ready = "[green]yes[/]" if result.ok else "[red]no[/]"
        facts = (result.work_tree, escape(result.interpreter))
        table.add_row(escape(result.image), str(result.num_tasks), ready, *facts, *times)
    return table
