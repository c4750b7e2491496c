"""`swerl tasks vet`: prove Tasks, and write the valid ones with a certificate."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from swerl.checks import vet_files
from swerl.checks.smoke import facts_for
from swerl.checks.vet import Rigour, VetSettings, Vetted, fitting_workers
from swerl.checks.vet_files import rejected_path
from swerl.cli._options import (
    BackendOption,
    JsonOption,
    SettingsAndLimitsOption,
    backend_options,
    open_backend,
    require_made_from,
    split_limits,
    tasks_in,
)
from swerl.cli._output import console, counted, print_json, safe, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.cli.tasks_select import TasksArgument
from swerl.core.errors import InputError, unknown
from swerl.core.sandbox import Limits
from swerl.tasks import select

_REMOTE_JOBS = 16
"""Tasks at once if sandboxes run on other machines."""
_ON_THIS_MACHINE = ("local", "docker")


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
        typer.Option(min=1, help="Tasks at the same time; by default one per core."),
    ] = None,
    gold_runs: Annotated[
        int, typer.Option(min=1, help="Required successful runs of the known solution.")
    ] = 3,
    drop_flaky: Annotated[
        bool,
        typer.Option("--drop-flaky", help="Drop flaky pass-to-pass tests, then vet the rest."),
    ] = False,
    whole_image: Annotated[
        bool,
        typer.Option("--whole-image", help="Reject a task if its image is not scanned whole."),
    ] = False,
    backend: BackendOption = "local",
    settings: SettingsAndLimitsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that each task fails without its solution, passes with it, and resists cheap cheats.

    The same command resumes after an interruption; a changed row or image is vetted again.
    """
    out = out or tasks.with_name(f"{tasks.stem}.certified.jsonl")
    _require_other(out, tasks)
    require_made_from(out, [task.id for task in tasks_in(tasks)])
    journal = vet_files.journal_path(out)
    limits, options = split_limits(settings or (), memory_mib=4096, num_processes=512)
    chosen = _instances(tasks, instance or [])
    with vet_files.locked(journal):
        vetting = VetSettings(
            backend=backend,
            rigour=Rigour(gold_runs, drop_flaky, whole_image),
            num_workers=_num_jobs(jobs, backend, limits),
            limits=limits,
            facts=facts_for(backend, backend_options(backend, options)),
            done=vet_files.read(journal),
        )
        found = _run(tasks, chosen, vetting, options, journal)
        counts = vet_files.write(tasks, out, vet_files.read(journal))
    if as_json:
        print_json([vet_files.as_row(each) for each in found])
    else:
        show(found)
    _say_where(out, *counts)
    _say_why(tasks, found)
    if any(each.failure for each in found):
        stderr().print("the infrastructure failed; the same command tries those tasks again")
        raise typer.Exit(1)


def _require_other(out: Path, tasks: Path) -> None:
    if out.resolve() == tasks.resolve():
        raise InputError(
            f"{out} would be overwritten, and the rejected tasks would be lost",
            hint="pass -o with another file",
        )


def _instances(tasks: Path, wanted: Sequence[str]) -> Collection[str]:
    """Return the ids to vet. Raises UnknownNameError on one that the file does not have."""
    known = {task.id: None for _, task in select.lines(tasks)}
    for name in wanted:
        if name not in known:
            raise unknown("instance", name, known)
    return wanted or known


def _num_jobs(jobs: int | None, backend: str, limits: Limits) -> int:
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


def _run(
    tasks: Path,
    chosen: Collection[str],
    settings: VetSettings,
    options: Sequence[str],
    journal: Path,
) -> list[Vetted]:
    from swerl.checks.vet import vet

    found: list[Vetted] = []
    with progress_bar(
        "tasks", len(chosen), note="[green]{task.fields[good]}[/] certified"
    ) as advance:

        def on_done(result: Vetted, is_new: bool) -> None:
            if is_new:
                vet_files.append(journal, result)
            found.append(result)
            advance(good=sum(each.ok for each in found))

        wanted = (task for _, task in select.lines(tasks) if task.id in chosen)
        sandboxes = open_backend(settings.backend, options, run="vet")
        work = vet(sandboxes, wanted, settings, on_done=on_done)
        run(work, after=f"every sandbox is closed, and the same command resumes from {journal}")
    return found


def _say_where(out: Path, num_certified: int, num_rejected: int) -> None:
    lines = [f"{num_certified:,} certified: {out}"]
    if num_rejected:
        lines.append(f"{num_rejected:,} rejected: {rejected_path(out)}")
    if num_certified:
        lines.append(f"next: swerl tasks solve-rate {out} --engine ENGINE")
    for line in lines:
        stderr().print(line, soft_wrap=True, markup=False)


def _say_why(tasks: Path, found: Sequence[Vetted]) -> None:
    """Print the command that shows the test log of a Task that was rejected."""
    rejected = [each.task for each in found if each.certificate and not each.ok]
    if rejected:
        command = f"swerl rollout --tasks {tasks} --instance {rejected[0]} --engine scripted:gold"
        line = f"why: {command} keeps the log of the tests in grade.json"
        stderr().print(line, soft_wrap=True, markup=False)


_NUM_LISTED = 100
"""Most Tasks that get a line each."""
_DETAIL_CHARS = 100


def show(found: Sequence[Vetted]) -> None:
    """Print the tables, and a line for each Task that failed or has flaky tests."""
    if len(found) <= _NUM_LISTED:
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
        if each.certificate and each.certificate.removed:
            removed = each.certificate.removed
            number = counted(len(removed), "file with the solution", "files with the solution")
            told = f"{each.task}: {number} removed from every sandbox: {', '.join(removed)}"
            console().print(told, markup=False, soft_wrap=True)
        for reason in each.certificate.unchecked if each.certificate else ():
            console().print(f"{each.task}: not checked: {reason}", markup=False, soft_wrap=True)


def _task_table(found: Sequence[Vetted]) -> Table:
    numbers = ("test s", "limit s", "MiB", "disk", "swapped", "claims", "bits", "vetting s")
    table = simple_table("task", "", *numbers, whole=("", *numbers), numbers=numbers)
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
            f"{told.swapped_share:.0%}",
            "" if told.swapped_claims is None else f"{told.swapped_claims:.0%}",
            f"{told.bits:.0f}",
            f"{each.seconds:.1f}",
        )
    return table


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"


def _reasons(found: Sequence[Vetted]) -> Mapping[str, tuple[int, str]]:
    """Return the number of Tasks with each defect, and the first one's detail."""
    reasons: dict[str, tuple[int, str]] = {}
    for each in found:
        for finding in each.certificate.findings if each.certificate else ():
            number, example = reasons.get(finding.defect, (0, f"{each.task}: {finding.detail}"))
            reasons[finding.defect] = (number + 1, example)
    return dict(sorted(reasons.items(), key=lambda item: -item[1][0]))


def _reason_table(reasons: Mapping[str, tuple[int, str]]) -> Table:
    table = simple_table("reason", "tasks", "for example", numbers={"tasks"})
    for reason, (number, example) in reasons.items():
        table.add_row(reason, f"{number:,}", safe(example[:_DETAIL_CHARS]))
    return table
