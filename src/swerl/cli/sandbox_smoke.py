"""`swerl sandbox smoke`: check that images can be worked in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swerl.cli._sandbox_options import BackendOption, SettingsOption

if TYPE_CHECKING:
    from rich.table import Table

    from swerl.checks.smoke import Place, Smoke
    from swerl.core.task import Task


def smoke(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    *,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Sandboxes at once.")] = 4,
    out: Annotated[
        Path | None,
        typer.Option(help="Append each result to this file; the same command goes on from it."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Try again what failed in --out's file.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Boot every image of a task file, and look for its git work tree and its interpreter."""
    from swerl.cli._output import console, stderr
    from swerl.cli._task_file import tasks_in
    from swerl.cli._text import counted

    job = _Job(tasks_in(tasks), backend, settings or [], workers, out, again)
    results = _run(job)
    failed = [result for result in results if not result.ok]
    if as_json:
        _print_json(results)
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
    """What the command line asks for."""

    tasks: list[Task]
    backend: str
    settings: list[str]
    workers: int
    out: Path | None
    again: bool

    def done(self) -> dict[Place, Smoke]:
        """Return what need not be checked again."""
        from swerl.checks import smoke_file

        known = smoke_file.read(self.out, self.backend) if self.out else {}
        return {place: each for place, each in known.items() if each.ok or not self.again}


def _run(job: _Job) -> list[Smoke]:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from swerl.checks import smoke, smoke_file
    from swerl.checks._image_facts import facts_for
    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.cli._sandbox_options import backend_options, open_backend

    places = {(task.image, task.workdir) for task in job.tasks}
    done = job.done()
    facts = facts_for(job.backend, backend_options(job.backend, job.settings))
    chosen = smoke.Settings(num_workers=job.workers, facts=facts, done=done)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        bar = progress.add_task("images", total=len(places))

        def heard(result: Smoke, is_new: bool) -> None:
            progress.advance(bar)
            if job.out and is_new:
                smoke_file.append(job.out, result, job.backend)

        sandboxes = open_backend(job.backend, job.settings, run="smoke")
        after = "every sandbox is closed" + (
            f", and the same command goes on from {job.out}" if job.out else ""
        )
        return run(smoke.check(sandboxes, job.tasks, chosen, tell=heard), after=after)


def _print_json(results: list[Smoke]) -> None:
    import json
    from dataclasses import asdict

    rows: list[dict[str, Any]] = [{**asdict(result), "ok": result.ok} for result in results]
    typer.echo(json.dumps(rows, indent=2))


def _table(results: list[Smoke]) -> Table:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    titles = ("image", "tasks", "ready", "work tree", "interpreter", "MiB", "boot ms", "exec ms")
    table = Table(box=SIMPLE, pad_edge=False)
    for title in titles:
        is_number = title in {"tasks", "MiB", "boot ms", "exec ms"}
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for each in results:
        has_booted = each.boot_s > 0
        times = (f"{each.boot_s * 1e3:.0f}", f"{each.exec_s * 1e3:.1f}") if has_booted else ("", "")
        size = f"{each.size / 2**20:,.0f}" if each.size else ""
        ready = "[green]yes[/]" if each.ok else "[red]no[/]"
        found = (each.work_tree, escape(each.interpreter), size)
        table.add_row(escape(each.image), str(each.num_tasks), ready, *found, *times)
    return table
