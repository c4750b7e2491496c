"""`swerl tasks vet`: prove Tasks, and write those that hold with a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swerl.cli._sandbox_options import BackendOption, SettingsOption
from swerl.cli.tasks_select import TasksArgument

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rich.table import Table

    from swerl.sandbox import Limits
    from swerl.tasks.vet import Settings, Vetted

_REMOTE_JOBS = 16
"""Tasks at once where sandboxes run on other machines."""
_ON_THIS_MACHINE = ("local", "docker")
_DETAIL_CHARS = 100


def vet(
    tasks: TasksArgument,
    *,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write; TASKS.certified.jsonl by default."),
    ] = None,
    instance: Annotated[
        list[str] | None, typer.Option("--instance", help="Vet only this task; may be repeated.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Tasks at once; as many as this machine has cores for."),
    ] = None,
    gold_runs: Annotated[
        int, typer.Option(min=1, help="How often the known solution must solve a task.")
    ] = 3,
    drop_flaky: Annotated[
        bool,
        typer.Option(
            "--drop-flaky", help="Take unsteady tests to keep out of a task, and vet the rest."
        ),
    ] = False,
    backend: BackendOption = "local",
    settings: SettingsOption = None,
    memory_mib: Annotated[int, typer.Option(min=16, help="Memory of a sandbox.")] = 4096,
    cpus: Annotated[float, typer.Option(min=0.1, help="Cores of a sandbox.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Prove that each task fails without its solution, passes with it, and is not cheated easily.

    The same command goes on where it was broken off; a changed row or image is vetted again.
    """
    import json

    from swerl.cli._output import stderr
    from swerl.sandbox import Limits
    from swerl.tasks import vet_file
    from swerl.tasks.vet import Rigour, Settings

    out = out or tasks.with_name(f"{tasks.stem}.certified.jsonl")
    journal = vet_file.journal_path(out)
    limits = Limits(memory_mib=memory_mib, num_processes=512, num_cpus=cpus)
    chosen = _instances(tasks, instance or [])
    with vet_file.alone(journal):
        settings_ = Settings(
            backend=backend,
            rigour=Rigour(gold_runs, drop_flaky),
            num_workers=_num_jobs(jobs, backend, limits),
            limits=limits,
            facts=_facts(backend, settings or []),
            done=vet_file.read(journal),
        )
        found = _run(tasks, chosen, settings_, settings or [], journal)
        num_certified, num_rejected = vet_file.write(tasks, out, vet_file.read(journal))
    if as_json:
        typer.echo(json.dumps([vet_file.as_row(each) for each in found], indent=2))
    else:
        _show(found)
    paths = {"certified": (num_certified, out)}
    if num_rejected:
        paths["rejected"] = (num_rejected, vet_file.rejected_path(out))
    for what, (number, path) in paths.items():
        stderr().print(f"{number:,} {what}: {path}", soft_wrap=True, markup=False)
    if any(each.failure for each in found):
        stderr().print("the machinery failed; the same command tries those tasks again")
        raise typer.Exit(1)
    if num_certified:
        stderr().print(f"next: swerl tasks probe {out}", soft_wrap=True, markup=False)


def _instances(tasks: Path, wanted: Sequence[str]) -> Collection[str]:
    """Return the ids to vet. Raises UnknownNameError on one that the file does not have."""
    from swerl.errors import unknown
    from swerl.tasks import select

    known = {task.id: None for _, task in select.lines(tasks)}
    for name in wanted:
        if name not in known:
            raise unknown("instance", name, known)
    return wanted or known


def _num_jobs(jobs: int | None, backend: str, limits: Limits) -> int:
    from swerl.cli._output import stderr
    from swerl.tasks.vet import fitting_workers

    if backend not in _ON_THIS_MACHINE:
        return jobs or _REMOTE_JOBS
    fitting = fitting_workers(limits)
    if jobs and jobs > fitting:
        stderr().print(
            f"warning: {jobs} at once on cores and memory for {fitting}: times will be too long",
            style="yellow",
            soft_wrap=True,
        )
    return jobs or fitting


def _facts(backend: str, settings: Sequence[str]) -> Any:
    from swerl.cli._sandbox_options import backend_options
    from swerl.tasks._image_facts import facts_for

    return facts_for(backend, backend_options(backend, settings))


def _run(
    tasks: Path, chosen: Collection[str], settings: Settings, options: Sequence[str], journal: Path
) -> list[Vetted]:
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.cli._sandbox_options import open_backend
    from swerl.tasks import select, vet_file
    from swerl.tasks.vet import vet

    found: list[Vetted] = []
    said = TextColumn("[green]{task.fields[good]}[/] certified")
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), said)
    with Progress(*columns, console=stderr(), transient=True) as progress:
        bar = progress.add_task("tasks", total=len(chosen), good=0)

        def heard(result: Vetted, is_new: bool) -> None:
            if is_new:
                vet_file.append(journal, result)
            found.append(result)
            progress.update(bar, advance=1, good=sum(each.ok for each in found))

        wanted = (task for _, task in select.lines(tasks) if task.id in chosen)
        work = vet(open_backend(settings.backend, options, run="vet"), wanted, settings, tell=heard)
        run(work, after=f"every sandbox is closed, and the same command goes on from {journal}")
    return found


def _show(found: Sequence[Vetted]) -> None:
    """Print a line for each Task that is not certified, and the tables."""
    from swerl.cli._output import console
    from swerl.cli._text import counted

    if len(found) <= 100:
        console().print(_task_table(found))
    if reasons := _reasons(found):
        console().print(_reason_table(reasons))
    for each in found:
        if each.failure:
            console().print(f"{each.task}: {each.failure}", markup=False, soft_wrap=True)
    for each in found:
        if each.certificate and each.certificate.flaky:
            flaky, dropped = each.certificate.flaky, len(each.certificate.dropped)
            number = counted(len(flaky), "flaky test")
            told = f"{each.task}: {number} ({dropped} dropped): {', '.join(flaky)}"
            console().print(told, markup=False, soft_wrap=True)


def _task_table(found: Sequence[Vetted]) -> Table:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("task", "", "test s", "limit s", "MiB", "disk", "canary", "vetting s"):
        is_number = title not in {"task", "", "canary"}
        table.add_column(title, justify="right" if is_number else "left", no_wrap=title != "task")
    for each in found:
        if not each.certificate:
            table.add_row(escape(each.task), "[red]failed[/]")
            continue
        told, took = each.certificate, each.certificate.measured
        table.add_row(
            escape(each.task),
            "[green]certified[/]" if each.ok else f"[yellow]{told.findings[0].defect}[/]",
            f"{took.test_s:.1f}",
            f"{told.timeout_s:.0f}",
            _mib(took.peak_memory_mib),
            _mib(took.disk_mib),
            {None: "", True: "yes", False: "no"}[told.canary],
            f"{each.seconds:.1f}",
        )
    return table


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"


def _reasons(found: Sequence[Vetted]) -> Mapping[str, tuple[int, str]]:
    """Return how many Tasks each defect concerns, and the first one's detail."""
    reasons: dict[str, tuple[int, str]] = {}
    for each in found:
        for finding in each.certificate.findings if each.certificate else ():
            number, example = reasons.get(finding.defect, (0, f"{each.task}: {finding.detail}"))
            reasons[finding.defect] = (number + 1, example)
    return dict(sorted(reasons.items(), key=lambda item: -item[1][0]))


def _reason_table(reasons: Mapping[str, tuple[int, str]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from swerl.cli._text import safe

    table = Table("reason", "tasks", "for example", box=SIMPLE, pad_edge=False)
    table.columns[1].justify = "right"
    table.columns[2].overflow = "fold"
    for reason, (number, example) in reasons.items():
        table.add_row(reason, f"{number:,}", safe(example[:_DETAIL_CHARS]))
    return table
