"""`swerl tasks show | stats | filter | sample | split`: print the tasks of a file; select some."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from swerl.cli._options import ForceOption, JsonOption, require_new
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.core.errors import InputError
from swerl.core.task import Task, find_task
from swerl.grading.log_parsers import unsupported
from swerl.tasks import select
from swerl.tasks.select import FACTS, Stats, compile_where

TasksArgument = Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")]
OutOption = Annotated[Path, typer.Option("-o", "--out", help="File to write.")]
SeedOption = Annotated[int, typer.Option(help="The same seed selects the same tasks.")]


def filter_tasks(
    tasks: TasksArgument,
    where: Annotated[
        str, typer.Argument(help="For example 'patch_lines < 50 and repo != \"a/b\"'.")
    ] = "",
    *,
    out: OutOption,
    force: ForceOption = False,
    solve_rate: Annotated[
        str, typer.Option(metavar="LOW..HIGH", help="Measured solve rate, for example 0.1..0.9.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Keep the tasks that match an expression or a solve rate.

    Names: id, repo, dataset, image, grader, log_parser, language, difficulty, solve_rate,
    prompt_chars, patch_lines, patch_files, num_fail_to_pass, num_pass_to_pass, timeout_s, and
    meta.NAME for other metadata.
    """
    wanted = [*([f"({where})"] if where.strip() else []), *_rates(solve_rate)]
    if not wanted:
        raise InputError("no condition is given", hint="pass WHERE or --solve-rate")
    require_new(out, force=force)
    num_chosen, num_all = select.filter_tasks(tasks, out, compile_where(" and ".join(wanted)))
    _say(num_chosen, num_all, out, as_json=as_json)
    if solve_rate:
        _warn_of_unmeasured(tasks)


def sample(
    tasks: TasksArgument,
    out: OutOption,
    *,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Tasks to keep.")],
    seed: SeedOption = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Keep a random sample; a larger sample contains every smaller one."""
    require_new(out, force=force)
    _say(*select.sample_tasks(tasks, out, number, seed=seed), out, as_json=as_json)


def split(
    tasks: TasksArgument,
    parts: Annotated[
        list[str], typer.Argument(metavar="NAME=SHARE...", help="Fractions with sum 1.")
    ],
    *,
    by_repo: Annotated[
        bool, typer.Option("--by-repo", help="Put no repository into two parts.")
    ] = False,
    seed: SeedOption = 0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Split a file at random; each part is a file beside it."""
    shares = dict(map(_share, parts))
    if len(shares) < len(parts):
        raise InputError("two parts have the same name", hint="for example train=0.9 test=0.1")
    for name in shares:
        require_new(select.part_path(tasks, name), force=force)
    done = select.split_tasks(tasks, shares, by_repo=by_repo, seed=seed)
    if as_json:
        print_json({name: {"file": path, "num_tasks": n} for name, (path, n) in done.items()})
    for path, count in done.values():
        note = "" if count else " (none fell to it: try another --seed, or larger shares)"
        console().print(f"{counted(count, 'task')}: {path}{note}", soft_wrap=True)


def _rates(text: str) -> list[str]:
    """Return the expression of a range of solve rates. Raises InputError."""
    if not text:
        return []
    low, _, high = text.partition("..")
    try:
        if not float(low) <= float(high):
            raise ValueError
        return [f"{float(low)} <= solve_rate <= {float(high)}"]
    except ValueError as error:
        raise InputError(
            f"--solve-rate {text!r:.80} is not a range", hint="for example --solve-rate 0.1..0.9"
        ) from error


def _warn_of_unmeasured(tasks: Path) -> None:
    """Say how many Tasks no range of solve rates can keep."""
    unmeasured = sum(task.metadata.get("solve_rate") is None for _, task in select.lines(tasks))
    if unmeasured:
        stderr().print(
            f"[yellow]{counted(unmeasured, 'task')} without a solve rate[/]: "
            f"swerl tasks solve-rate {escape(str(tasks))} --engine ENGINE measures them",
            soft_wrap=True,
        )


def _share(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        if not name.replace("-", "_").isidentifier():
            raise ValueError
        return name, float(share)
    except ValueError as error:
        raise InputError(
            f"{text!r:.80} is not a part of a split", hint="for example train=0.9 test=0.1"
        ) from error


def _say(num_chosen: int, num_all: int, out: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({"file": out, "num_tasks": num_chosen, "num_all": num_all})
    console().print(f"{num_chosen:,} of {counted(num_all, 'task')}: {out}", soft_wrap=True)
    if num_chosen:
        console().print(f"next: swerl tasks stats {out}", soft_wrap=True)


_COLUMNS = {
    "id": "task",
    "grader": "grader",
    "num_fail_to_pass": "fail to pass",
    "num_pass_to_pass": "pass to pass",
    "patch_lines": "lines",
    "difficulty": "difficulty",
    "solve_rate": "solved",
}
"""Fact -> title; facts that no listed Task has are left out."""
_NUMBERS = {"fail to pass", "pass to pass", "lines", "solved"}
_NUM_VALUES = 12
"""Maximum values listed per group; the rest are counted."""


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
    """List the tasks of a file, or show one of them."""
    found = (task for _, task in select.lines(tasks))
    if instance:
        _show_one(find_task(found, instance), hidden=hidden, as_json=as_json)
        return
    if as_json:
        print_json([_facts(task) for task in itertools.islice(found, limit)])
        return
    console().print(_list(list(itertools.islice(found, limit))))
    if rest := sum(1 for _ in found):
        console().print(f"and {counted(rest, 'more task')}; --limit lists more")


def stats(
    tasks: TasksArgument,
    *,
    as_json: JsonOption = False,
) -> None:
    """Count the tasks of a file by repository, size, grader and difficulty."""

    from swerl.tasks.select import count

    found = count(task for _, task in select.lines(tasks))
    if as_json:
        # JSON has no keys of two parts, so the pairs go out as what they lack.
        shown = asdict(found) | {"missing": unsupported(found.kinds)}
        del shown["kinds"]
        print_json(shown)
    else:
        _print_stats(found, tasks)


def _list(found: list[Task]) -> Table:
    rows = [{name: FACTS[name](task) for name in _COLUMNS} for task in found]
    said = [name for name in _COLUMNS if any(row[name] is not None for row in rows)]
    titles = [_COLUMNS[name] for name in said]
    table = simple_table(*titles, whole=set(titles) - {"task"}, numbers=_NUMBERS)
    for row in rows:
        table.add_row(*("" if row[name] is None else escape(str(row[name])) for name in said))
    return table


def _facts(task: Task) -> dict[str, Any]:
    return {name: fact(task) for name, fact in FACTS.items()}


def _show_one(task: Task, *, hidden: bool, as_json: bool) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    facts = _facts(task)
    others = {
        name: value
        for name, value in task.metadata.items()
        if name not in facts and isinstance(value, str | int | float)
    }
    shown = {**facts, "workdir": task.workdir, "base_commit": task.base_commit, **others}
    if as_json:
        print_json({**shown, "prompt": task.prompt, **(_hidden(task) if hidden else {})})
        return
    for name, value in shown.items():
        if value not in (None, ""):
            table.add_row(f"[dim]{escape(name)}[/]", escape(str(value)))
    console().print(table)
    _section("prompt", task.prompt)
    if hidden:
        for title, text in _hidden(task).items():
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
    console().rule(title, align="left")
    console().print(text.rstrip("\n"), markup=False, soft_wrap=True)


def _print_stats(found: Stats, path: Path) -> None:
    console().print(
        f"{counted(found.num_tasks, 'task')} in {path}, {counted(found.num_images, 'image')}",
        soft_wrap=True,
    )
    numbers = ("smallest", "median", "mean", "largest")
    table = simple_table("", *numbers, numbers=numbers)
    for name, spread in found.numbers.items():
        table.add_row(name, *(f"{value:,.0f}" for value in spread))
    console().print(table)
    for name, counts in found.groups.items():
        if set(counts) != {""}:
            console().print(_group(name, counts))
    if found.solve_rates:
        mean = sum(found.solve_rates) / len(found.solve_rates)
        console().print(f"solve rate {mean:.1%} of {counted(len(found.solve_rates), 'task')}")
    for what, number in unsupported(found.kinds).items():
        stderr().print(f"[yellow]{counted(number, 'task')}[/]: {what}", soft_wrap=True)


def _group(name: str, counts: dict[str, int]) -> Table:
    table = simple_table(name, "tasks", numbers={"tasks"})
    values = list(counts.items())
    for value, number in values[:_NUM_VALUES]:
        table.add_row(escape(value or "(not said)"), f"{number:,}")
    if rest := values[_NUM_VALUES:]:
        total = sum(number for _, number in rest)
        table.add_row(f"[dim]{counted(len(rest), 'other')}[/]", f"{total:,}")
    return table
