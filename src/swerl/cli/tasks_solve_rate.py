"""`swerl tasks solve-rate`: measure how often a policy solves each Task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli._options import (
    JsonOption,
    ModelOption,
    RecipeSettingsOption,
    kinds,
    read_engine,
    recipe_of,
    require_made_from,
    tasks_in,
)
from swerl.cli.tasks_select import TasksArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.table import Table

    from swerl.checks.solve_rate import Attempts
    from swerl.cli._options import EngineChoice
    from swerl.core.chat import Message
    from swerl.core.events import Emit
    from swerl.core.task import Task
    from swerl.recipe.schema import Recipe

_SCRIPTS = ("gold", "noop")
_SETTINGS = (
    "rollout.max_turns=200",
    "limits.memory_mib=4096",
    "limits.num_processes=512",
    "limits.num_cpus=1",
    "limits.disk_mib=4096",
)
"""Sandbox limits for a real repository."""
_NUM_SHOWN = 100


def solve_rate(
    tasks: TasksArgument,
    *,
    engine: Annotated[str, typer.Option(help=f"{kinds(_SCRIPTS)}.")],
    attempts: Annotated[
        int, typer.Option("-k", "--attempts", min=1, help="Attempts at each task.")
    ] = 8,
    agent: Annotated[
        str, typer.Option(help="An agent: builtin, claude-code, codex, …")
    ] = "builtin",
    model: ModelOption = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write; TASKS.probed.jsonl by default."),
    ] = None,
    instance: Annotated[
        list[str] | None,
        typer.Option("--instance", help="Attempt only this task; may be repeated."),
    ] = None,
    settings: RecipeSettingsOption = None,
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Attempt each task several times, and write its solve rate into its row.

    The same command resumes after an interruption, and more attempts add to fewer.
    """
    from swerl.checks.solve_rate import MeasuredPolicy, write
    from swerl.core.errors import InputError

    chosen = read_engine(engine, _SCRIPTS)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"probe-{tasks.stem}-{agent}")
    made = [*_SETTINGS, f"name={name}", f"harness.type={agent}"]
    recipe = recipe_of(chosen, model, made=made, settings=settings or ())
    out = out or tasks.with_name(f"{tasks.stem}.probed.jsonl")
    if out.resolve() == tasks.resolve():
        hint = "name another file with -o: the original is needed to attempt again"
        raise InputError(f"{out} is the task file itself", hint=hint)
    require_made_from(out, [task.id for task in tasks_in(tasks)])
    found = _run(recipe, _wanted(tasks, instance or []), runs, attempts, chosen)
    policy = MeasuredPolicy(agent, chosen.text, model or "")
    num_rated = write(tasks, out, found, policy)
    _report(found, out, num_rated, as_json=as_json)
    if num_rated < len(found):
        raise typer.Exit(1)


def _report(found: Mapping[str, Attempts], out: Path, num_rated: int, *, as_json: bool) -> None:
    from dataclasses import asdict

    from swerl.cli._output import console, counted, print_json, stderr

    if as_json:
        rows = [{**asdict(each), "solve_rate": each.solve_rate} for each in found.values()]
        print_json(rows)
    else:
        console().print(_table(found))
    lost = sum(each.lost for each in found.values())
    if lost:
        stderr().print(
            f"{counted(lost, 'attempt')} lost to the infrastructure; the same command tries again"
        )
    stderr().print(f"{counted(num_rated, 'solve rate')}: {out}", soft_wrap=True, markup=False)
    stderr().print(
        f"next: swerl tasks filter {out} --solve-rate 0.1..0.9 -o some.jsonl",
        soft_wrap=True,
        markup=False,
    )


def _wanted(tasks: Path, instance: Sequence[str]) -> list[Task]:
    from swerl.core.task import find_task

    found = tasks_in(tasks)
    return [find_task(found, name) for name in instance] or found


def _run(
    recipe: Recipe, tasks: list[Task], runs: Path, attempts: int, engine: EngineChoice
) -> Mapping[str, Attempts]:
    from swerl.cli._output import stderr
    from swerl.cli._run import progress_bar, run, waiting
    from swerl.core.events import Event, Notice
    from swerl.rollout import wiring

    def emit(event: Event) -> None:
        if isinstance(event, Notice):
            stderr().print(event.text, markup=False)

    with waiting(f"preparing the agent {recipe.harness.type}"):
        wiring.harness_of(recipe).mounts()
    with progress_bar("tasks", len(tasks)) as advance:
        work = _measure(
            recipe,
            tasks,
            runs / recipe.name,
            num_attempts=attempts,
            script=engine.script,
            on_done=lambda _: advance(),
            emit=emit,
        )
        return run(work, after="every sandbox is closed, and the same command resumes")


async def _measure(
    recipe: Recipe,
    tasks: Sequence[Task],
    root: Path,
    *,
    num_attempts: int,
    script: str | None,
    on_done: Callable[[Attempts], None],
    emit: Emit,
) -> dict[str, Attempts]:
    """Attempt each Task in the run folder at `root`, which keeps finished attempts.

    Raises RunError if the folder belongs to another recipe, TaskError for the script `gold` if a
    Task has no known solution.
    """
    from swerl.checks.solve_rate import measure
    from swerl.core.contracts import EngineSetup
    from swerl.rollout import wiring
    from swerl.runs.layout import open_run

    with open_run(root, recipe.model_dump(mode="json")) as folder:
        family = wiring.family_of(recipe, recipe.model.path)
        setup = EngineSetup(
            family=family,
            log_dir=folder.new_attempt(),
            model=recipe.model.path,
            script=None if script is None else _script(script, recipe, tasks),
        )
        await wiring.reap_leftovers(recipe, emit)
        async with (
            wiring.engine_of(recipe, setup) as engine,
            wiring.gateway_of(recipe, engine, setup, emit) as gateway,
        ):
            parts = wiring.parts_of(recipe, gateway, emit)
            return await measure(tasks, parts, folder, num_attempts=num_attempts, on_done=on_done)


def _script(name: str, recipe: Recipe, tasks: Sequence[Task]) -> Callable[[str], Sequence[Message]]:
    """Return each session's replies; a session id begins with the digest of its Task's row."""
    from swerl.cli.rollout import replies
    from swerl.core.certificate import row_digest
    from swerl.rollout import wiring

    harness = wiring.harness_of(recipe)
    known = {row_digest(task): replies(name, harness, task) for task in tasks}
    return lambda session: known[session.partition("/")[0]]


def _table(found: Mapping[str, Attempts]) -> Table:
    from rich.markup import escape

    from swerl.cli._output import simple_table

    numbers = ("solved", "attempts", "lost", "tokens", "turns", "seconds")
    table = simple_table("task", *numbers, numbers=numbers)
    for each in list(found.values())[:_NUM_SHOWN]:
        rate = each.solve_rate
        table.add_row(
            escape(each.task),
            "" if rate is None else f"{rate:.0%}",
            str(each.attempts),
            str(each.lost or ""),
            f"{each.tokens:,.0f}",
            f"{each.turns:.1f}",
            f"{each.seconds:.1f}",
        )
    return table
