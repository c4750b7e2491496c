"""`swerl tasks vet`: prove Tasks, and write the valid ones with a certificate."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from swerl.checks import vet as vetting
from swerl.checks.discover import Discoveries, declared
from swerl.checks.smoke import digests_for
from swerl.checks.vet import Rigour, Runs, VetSettings, Vetted, fitting_workers, rejected_path
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
from swerl.core.jobs import run_jobs
from swerl.core.sandbox import Limits
from swerl.core.task import Task, write_tasks
from swerl.grading.confirm import is_declared
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
    discover: Annotated[
        bool, typer.Option("--discover", help="First find the tests of tasks that name none.")
    ] = False,
    drop_flaky: Annotated[
        bool,
        typer.Option("--drop-flaky", help="Drop flaky pass-to-pass tests, then vet the rest."),
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
    journal = vetting.journal_path(out)
    limits, options = split_limits(settings or (), memory_mib=4096, num_processes=512)
    chosen = _instances(tasks, instance or [])
    if discover:
        tasks = _with_tests(tasks, Runs(open_backend(backend, options, run="vet"), limits))
    with vetting.locked(journal):
        chosen_settings = VetSettings(
            backend=backend,
            rigour=Rigour(gold_runs, drop_flaky),
            num_workers=_num_jobs(jobs, backend, limits),
            limits=limits,
            digest=digests_for(backend, backend_options(backend, options)),
            journal=vetting.read_journal(journal),
        )
        results = _run(tasks, chosen, chosen_settings, options, journal)
        counts = vetting.write_results(tasks, out, vetting.read_journal(journal))
    if as_json:
        print_json([vetting.as_row(result) for result in results])
    else:
        show(results)
    _print_files(out, *counts)
    _print_log_command(tasks, results)
    if any(result.failure for result in results):
        stderr().print("the infrastructure failed; the same command tries those tasks again")
        raise typer.Exit(1)


def _require_other(out: Path, tasks: Path) -> None:
    if out.resolve() == tasks.resolve():
        raise InputError(
            f"{out} would be overwritten, and the rejected tasks would be lost",
            hint="pass -o with another file",
        )


def _instances(tasks: Path, names: Sequence[str]) -> Collection[str]:
    """Return the ids to vet. Raises UnknownNameError on one that the file does not have."""
    ids = {task.id: None for _, task in select.lines(tasks)}
    for name in names:
        if name not in ids:
            raise unknown("instance", name, ids)
    return names or ids


def _with_tests(tasks: Path, runs: Runs) -> Path:
    """Write the tasks with the tests that they lack; return the new file."""
    journal = tasks.with_name(f"{tasks.stem}.discoveries.jsonl")
    discoveries = Discoveries(runs, journal)

    async def with_tests(task: Task) -> Task:
        if is_declared(task.grading) or task.grading.grader != "swebench" or not task.gold_patch:
            return task
        tests = await discoveries.of(task)
        if tests.problem:
            stderr().print(safe(f"{task.id}: no tests: {tests.problem}"), soft_wrap=True)
            return task
        return replace(task, grading=declared(task.grading, tests))

    all_tasks = [task for _, task in select.lines(tasks)]
    with progress_bar("tests of tasks", len(all_tasks)) as advance:
        num_jobs = fitting_workers(runs.limits)
        work = run_jobs(all_tasks, with_tests, limit=num_jobs, on_done=lambda _: advance())
        whole = run(work, after=f"the same command resumes from {journal}")
    out = tasks.with_name(f"{tasks.stem}.discovered.jsonl")
    write_tasks(out, whole)
    return out


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
    results: list[Vetted] = []
    with progress_bar(
        "tasks", len(chosen), note="[green]{task.fields[good]}[/] certified"
    ) as advance:

        def on_done(result: Vetted, is_new: bool) -> None:
            if is_new:
                vetting.append_to_journal(journal, result)
            results.append(result)
            advance(good=sum(vetted.ok for vetted in results))

        selected = (task for _, task in select.lines(tasks) if task.id in chosen)
        sandboxes = open_backend(settings.backend, options, run="vet")
        work = vetting.vet(sandboxes, selected, settings, on_done=on_done)
        run(work, after=f"every sandbox is closed, and the same command resumes from {journal}")
    return results


def _print_files(out: Path, num_certified: int, num_rejected: int) -> None:
    lines = [f"{num_certified:,} certified: {out}"]
    if num_rejected:
        lines.append(f"{num_rejected:,} rejected: {rejected_path(out)}")
    if num_certified:
        lines.append(f"next: swerl tasks solve-rate {out} --engine ENGINE")
    for line in lines:
        stderr().print(line, soft_wrap=True, markup=False)


def _print_log_command(tasks: Path, results: Sequence[Vetted]) -> None:
    """Print the command that shows the test log of a Task that was rejected."""
    rejected = [result.task for result in results if result.certificate and not result.ok]
    if rejected:
        command = f"swerl rollout --tasks {tasks} --instance {rejected[0]} --engine scripted:gold"
        line = f"why: {command} keeps the log of the tests in grade.json"
        stderr().print(safe(line), soft_wrap=True)


_NUM_LISTED = 100
"""Most Tasks that get a line each."""
_DETAIL_CHARS = 100


def show(results: Sequence[Vetted]) -> None:
    """Print the tables, and a line for each failure, flaky test, removed or unread file."""
    if len(results) <= _NUM_LISTED:
        console().print(_task_table(results))
    if reasons := _reasons(results):
        console().print(_reason_table(reasons))
    for result in results:
        for line in _details(result):
            console().print(safe(f"{result.task}: {line}"), soft_wrap=True)


def _details(result: Vetted) -> Iterator[str]:
    if result.failure:
        yield result.failure
    certificate = result.certificate
    if certificate is None:
        return
    if certificate.flaky:
        number = counted(len(certificate.flaky), "flaky test")
        yield f"{number} ({len(certificate.dropped)} dropped): {', '.join(certificate.flaky)}"
    if certificate.removed:
        number = counted(
            len(certificate.removed), "file with the solution", "files with the solution"
        )
        yield f"{number} removed from every sandbox: {', '.join(certificate.removed)}"
    if result.ok and certificate.why:
        yield f"{certificate.strength}: {certificate.why}"
    for reason in certificate.unchecked:
        yield f"not checked: {reason}"


def _task_table(results: Sequence[Vetted]) -> Table:
    numbers = ("test s", "limit s", "strength", "share", "vetting s")
    table = simple_table("task", "", *numbers, whole=("", *numbers), numbers=numbers)
    for result in results:
        certificate = result.certificate
        if not certificate:
            table.add_row(safe(result.task), "[red]failed[/]")
            continue
        cost = certificate.measured
        table.add_row(
            safe(result.task),
            "[green]certified[/]" if result.ok else f"[yellow]{certificate.findings[0].defect}[/]",
            f"{cost.test_s:.1f}",
            f"{certificate.timeout_s:.0f}",
            str(certificate.strength),
            f"{certificate.share:.0%}",
            f"{result.seconds:.1f}",
        )
    return table


def _reasons(results: Sequence[Vetted]) -> Mapping[str, tuple[int, str]]:
    """Return the number of Tasks with each defect, and the first one's detail."""
    reasons: dict[str, tuple[int, str]] = {}
    for result in results:
        for finding in result.certificate.findings if result.certificate else ():
            example = f"{result.task}: {finding.detail}"
            number, example = reasons.get(finding.defect, (0, example))
            reasons[finding.defect] = (number + 1, example)
    return dict(sorted(reasons.items(), key=lambda item: -item[1][0]))


def _reason_table(reasons: Mapping[str, tuple[int, str]]) -> Table:
    table = simple_table("reason", "tasks", "for example", numbers={"tasks"})
    for reason, (number, example) in reasons.items():
        table.add_row(reason, f"{number:,}", safe(example[:_DETAIL_CHARS]))
    return table
