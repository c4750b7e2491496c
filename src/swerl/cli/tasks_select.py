"""`swerl tasks filter`, `sample` and `split`: select Tasks by expression or at random."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import ForceOption, JsonOption, require_new
from swerl.cli._output import console, counted, print_json
from swerl.core.errors import InputError

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
    from swerl.tasks import select
    from swerl.tasks.select import compile_where

    wanted = [*([f"({where})"] if where.strip() else []), *_rates(solve_rate)]
    if not wanted:
        raise InputError("no condition is given", hint="pass WHERE or --solve-rate")
    require_new(out, force=force)
    num_chosen, num_all = select.filter_tasks(tasks, out, compile_where(" and ".join(wanted)))
    _say(num_chosen, num_all, out, as_json=as_json)


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
    from swerl.tasks import select

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
    from swerl.tasks import select

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
