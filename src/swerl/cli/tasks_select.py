"""`swerl tasks show | filter`: print the tasks of a file; select some."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from swerl.cli._options import ForceOption, JsonOption, require_new
from swerl.cli._output import console, counted, print_json, safe, simple_table, stderr
from swerl.core.errors import InputError
from swerl.core.task import Task, find_task
from swerl.grading.log_parsers import unsupported
from swerl.tasks import select
from swerl.tasks.select import FACTS, Choice, Stats

TasksArgument = Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")]

_COLUMNS = {
    "id": "task",
    "grader": "grader",
    "num_fail_to_pass": "fail to pass",
    "num_pass_to_pass": "pass to pass",
    "patch_lines": "lines",
    "difficulty": "difficulty",
    "solve_rate": "solved",
    "strength": "strength",
}
"""Fact -> title; facts that no listed Task has are left out."""
_NUMERIC_TITLES = {"fail to pass", "pass to pass", "lines", "solved"}
_NUM_VALUES = 12
"""Maximum values listed per group; the rest are counted."""


def filter_tasks(
    tasks: TasksArgument,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")],
    repo: Annotated[
        list[str] | None, typer.Option(help="Only this repository; may be repeated.")
    ] = None,
    max_files: Annotated[
        int | None, typer.Option(min=0, help="Maximum files that the solution changes.")
    ] = None,
    solve_rate: Annotated[
        str, typer.Option(metavar="LOW:HIGH", help="Measured solve rate, for example 0.1:0.9.")
    ] = "",
    split: Annotated[
        str,
        typer.Option(metavar="FROM:TO", help="Random part: 0:0.9 for training, 0.9:1 for tests."),
    ] = "",
    sample: Annotated[int | None, typer.Option(min=1, help="Random tasks to keep.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed selects the same tasks.")] = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the tasks that meet all conditions to another file."""
    choice = Choice(
        repos=tuple(repo or ()),
        max_files=max_files,
        solve_rate=_interval("--solve-rate", solve_rate),
        split=_interval("--split", split),
        sample=sample,
        seed=seed,
    )
    if choice == Choice(seed=seed):
        raise InputError(
            "no condition is given",
            hint="pass --repo, --max-files, --solve-rate, --split or --sample",
        )
    require_new(out, force=force)
    num_chosen, num_all = select.filter_tasks(tasks, out, choice)
    if as_json:
        print_json({"file": out, "num_tasks": num_chosen, "num_all": num_all})
    console().print(f"{num_chosen:,} of {counted(num_all, 'task')}: {out}", soft_wrap=True)
    if num_chosen:
        console().print(f"next: swerl tasks show {out}", soft_wrap=True)
    if solve_rate:
        _warn_of_unmeasured(tasks)


def show(
    tasks: TasksArgument,
    instance: Annotated[str, typer.Argument(metavar="[ID]", help="Show this task in full.")] = "",
    *,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Also show the solution and the tests.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum tasks to list.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Count and list the tasks of a file, or show one of them."""
    if instance:
        task = find_task((task for _, task in select.lines(tasks)), instance)
        _show_one(task, hidden=hidden, as_json=as_json)
        return
    stats = select.count(task for _, task in select.lines(tasks))
    listed = [task for (_, task), _ in zip(select.lines(tasks), range(limit), strict=False)]
    if as_json:
        counts = {
            "num_tasks": stats.num_tasks,
            "num_images": stats.num_images,
            "groups": stats.groups,
            "numbers": stats.numbers,
            "solve_rates": stats.solve_rates,
            "missing": unsupported(stats.kinds),
        }
        print_json({**counts, "tasks": [_facts(task) for task in listed]})
        return
    _print_stats(stats, tasks)
    console().print(_list(listed))
    if rest := stats.num_tasks - len(listed):
        console().print(f"and {counted(rest, 'more task')}; --limit lists more")


def _interval(option: str, text: str) -> tuple[float, float] | None:
    """Return the two numbers of `LOW:HIGH`; None without text. Raises InputError."""
    if not text:
        return None
    low, _, high = text.partition(":")
    try:
        if 0 <= float(low) <= float(high) <= 1:
            return float(low), float(high)
    except ValueError:
        pass
    raise InputError(
        f"{option} {text!r:.80} is not an interval of 0 to 1", hint=f"for example {option} 0.1:0.9"
    )


def _warn_of_unmeasured(tasks: Path) -> None:
    """Print how many Tasks no range of solve rates can keep."""
    unmeasured = sum(task.metadata.get("solve_rate") is None for _, task in select.lines(tasks))
    if unmeasured:
        stderr().print(
            f"[yellow]{counted(unmeasured, 'task')} without a solve rate[/]: "
            f"swerl tasks solve-rate {escape(str(tasks))} --engine ENGINE measures them",
            soft_wrap=True,
        )


def _list(tasks: list[Task]) -> Table:
    rows = [{name: FACTS[name](task) for name in _COLUMNS} for task in tasks]
    names = [name for name in _COLUMNS if any(row[name] is not None for row in rows)]
    titles = [_COLUMNS[name] for name in names]
    table = simple_table(*titles, whole=set(titles) - {"task"}, numbers=_NUMERIC_TITLES)
    for row in rows:
        table.add_row(*("" if row[name] is None else safe(str(row[name])) for name in names))
    return table


def _facts(task: Task) -> dict[str, Any]:
    return {name: fact(task) for name, fact in FACTS.items()}


def _show_one(task: Task, *, hidden: bool, as_json: bool) -> None:
    facts = _facts(task)
    metadata = {
        name: value
        for name, value in task.metadata.items()
        if name not in facts and isinstance(value, str | int | float)
    }
    shown = {**facts, "workdir": task.workdir, "base_commit": task.base_commit, **metadata}
    if as_json:
        print_json({**shown, "prompt": task.prompt, **(_hidden(task) if hidden else {})})
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in shown.items():
        if value not in (None, ""):
            table.add_row(f"[dim]{safe(name)}[/]", safe(str(value)))
    console().print(table)
    _section("prompt", task.prompt)
    for title, text in _hidden(task).items() if hidden else ():
        if text:
            _section(title, text)


def _hidden(task: Task) -> dict[str, str]:
    """Return title -> text of what an agent may not see."""
    spec = task.grading
    files = {**task.files, **spec.test_files, **spec.files}
    return {
        "setup": task.setup,
        "test command": spec.test_command,
        "fail to pass": "\n".join(spec.fail_to_pass),
        "pass to pass": "\n".join(spec.pass_to_pass),
        "expected": "\n".join(f"{status} {name}" for name, status in spec.expected.items()),
        "files": "\n".join(f"{path} ({len(text):,} characters)" for path, text in files.items()),
        "test patch": spec.test_patch,
        "solution": task.gold_patch,
    }


def _section(title: str, text: str) -> None:
    console().print(f"\n[bold]── {title} ──[/]")
    for line in text.rstrip("\n").split("\n"):
        console().print(safe(line), soft_wrap=True)


def _print_stats(stats: Stats, path: Path) -> None:
    console().print(
        f"{counted(stats.num_tasks, 'task')} in {path}, {counted(stats.num_images, 'image')}",
        soft_wrap=True,
    )
    titles = ("smallest", "median", "mean", "largest")
    table = simple_table("", *titles, numbers=titles)
    for name, spread in stats.numbers.items():
        table.add_row(name, *(f"{value:,.0f}" for value in spread))
    console().print(table)
    for name, counts in stats.groups.items():
        if set(counts) != {""}:
            console().print(_group(name, counts))
    if stats.solve_rates:
        mean = sum(stats.solve_rates) / len(stats.solve_rates)
        console().print(f"solve rate {mean:.1%} of {counted(len(stats.solve_rates), 'task')}")
    for gap, number in unsupported(stats.kinds).items():
        stderr().print(f"[yellow]{counted(number, 'task')}[/]: {safe(gap)}", soft_wrap=True)


def _group(name: str, counts: dict[str, int]) -> Table:
    table = simple_table(name, "tasks", numbers={"tasks"})
    values = list(counts.items())
    for value, number in values[:_NUM_VALUES]:
        table.add_row(safe(value or "(unknown)"), f"{number:,}")
    if rest := values[_NUM_VALUES:]:
        total = sum(number for _, number in rest)
        table.add_row(f"[dim]{counted(len(rest), 'other')}[/]", f"{total:,}")
    return table
