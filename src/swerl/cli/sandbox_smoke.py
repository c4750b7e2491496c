"""`swerl sandbox smoke`: check that images boot, with git and the tests' interpreter."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swerl.checks.smoke import SmokeResult
from swerl.cli._options import (
    BackendOption,
    JsonOption,
    SettingsOption,
    backend_options,
    open_backend,
    tasks_in,
)
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.core.task import Task


def smoke(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
    out: Annotated[
        Path | None,
        typer.Option(help="Append each result to this file; the same command resumes from it."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Try again what failed in --out's file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Boot every image of a task file, and check its git work tree and its interpreter."""
    job = _Job(tasks_in(tasks), backend, settings or [], workers, out, again)
    results = _run(job)
    failed = [result for result in results if not result.ok]
    if as_json:
        print_json([{**asdict(result), "ok": result.ok} for result in results])
    else:
        console().print(_table(results))
        for result in failed:
            line = f"{result.image} {result.workdir}: {result.failure}"
            console().print(line, style="red", markup=False, soft_wrap=True)
    if out and not as_json:
        stderr().print(f"results: {out}", soft_wrap=True, markup=False)
    if failed:
        more = "; `--again` tries them once more" if out else ""
        stderr().print(f"{len(failed)} of {counted(len(results), 'image')} failed{more}")
        raise typer.Exit(1)
    hint = "; next: `swerl rollout --instance ID --tasks FILE`" if not as_json else ""
    stderr().print(f"{counted(len(results), 'image')} ready, 0 failed{hint}")


@dataclass(frozen=True, slots=True)
class _Job:
    tasks: list[Task]
    backend: str
    settings: list[str]
    workers: int
    out: Path | None
    again: bool


def _run(job: _Job) -> list[SmokeResult]:
    from swerl.checks import smoke

    keys = {(task.image, task.workdir) for task in job.tasks}
    known = smoke.read(job.out, job.backend) if job.out else {}
    done = {key: each for key, each in known.items() if each.ok or not job.again}
    facts = smoke.facts_for(job.backend, backend_options(job.backend, job.settings))
    chosen = smoke.SmokeSettings(num_workers=job.workers, facts=facts, done=done)
    seen: list[SmokeResult] = []
    with progress_bar("images", len(keys)) as advance:

        def on_done(result: SmokeResult, is_new: bool) -> None:
            advance()
            seen.append(result)
            if job.out and is_new:
                smoke.append(job.out, result, job.backend)

        sandboxes = open_backend(job.backend, job.settings, run="smoke")
        after = "every sandbox is closed" + (
            f", and the same command resumes from {job.out}" if job.out else ""
        )
        try:
            return run(smoke.check(sandboxes, job.tasks, chosen, on_done=on_done), after=after)
        except typer.Exit:  # interrupted: what is done is still worth reading
            if seen:
                console().print(_table(seen))
            raise


def _table(results: list[SmokeResult]) -> Table:
    titles = ("image", "tasks", "ready", "work tree", "interpreter", "MiB", "boot ms", "exec ms")
    table = simple_table(*titles, numbers={"tasks", "MiB", "boot ms", "exec ms"})
    for each in results:
        has_booted = each.boot_s > 0
        times = (f"{each.boot_s * 1e3:.0f}", f"{each.exec_s * 1e3:.1f}") if has_booted else ("", "")
        size = f"{each.size / 2**20:,.0f}" if each.size else ""
        ready = "[green]yes[/]" if each.ok else "[red]no[/]"
        found = (each.work_tree, escape(each.interpreter), size)
        table.add_row(escape(each.image), str(each.num_tasks), ready, *found, *times)
    return table
