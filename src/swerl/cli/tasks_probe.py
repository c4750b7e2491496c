"""`swerl tasks probe`: how often a policy solves each Task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli._engine_option import kinds, read_engine, recipe_of
from swerl.cli.tasks_select import TasksArgument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from swerl.checks.solve_rate import Probed
    from swerl.cli._engine_option import EngineChoice
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
"""The sandbox is that of a real repository."""
_NUM_SHOWN = 100


def probe(
    tasks: TasksArgument,
    *,
    engine: Annotated[str, typer.Option(help=f"{kinds(_SCRIPTS)}.")],
    attempts: Annotated[int, typer.Option("-k", "--attempts", min=1, help="Tries a task.")] = 8,
    agent: Annotated[
        str, typer.Option(help="An agent: builtin, claude-code, codex, …")
    ] = "builtin",
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a model or of a run; for openai=URL the model's name there."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write; TASKS.probed.jsonl by default."),
    ] = None,
    instance: Annotated[
        list[str] | None, typer.Option("--instance", help="Probe only this task; may be repeated.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all run folders.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Attempt each task several times, and write its solve rate into its row.

    The same command goes on where it was broken off, and more attempts add to fewer.
    """
    from swerl.checks import solve_rate as probing

    chosen = read_engine(engine, _SCRIPTS)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"probe-{tasks.stem}-{agent}")
    made = [*_SETTINGS, f"name={name}", f"harness.type={agent}"]
    recipe = recipe_of(chosen, model, made=made, settings=settings or ())
    found = _run(recipe, _wanted(tasks, instance or []), runs, attempts, chosen)
    out = out or tasks.with_name(f"{tasks.stem}.probed.jsonl")
    policy = probing.Policy(agent, chosen.text, model or "")
    num_rated = probing.write(tasks, out, found, policy)
    _report(found, out, num_rated, as_json=as_json)
    if num_rated < len(found):
        raise typer.Exit(1)


def _report(found: Mapping[str, Probed], out: Path, num_rated: int, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    from swerl.cli._output import console, stderr
    from swerl.cli._text import counted

    if as_json:
        rows = [{**asdict(each), "solve_rate": each.solve_rate} for each in found.values()]
        typer.echo(json.dumps(rows, indent=2))
    else:
        console().print(_table(found))
    lost = sum(each.lost for each in found.values())
    if lost:
        stderr().print(
            f"{counted(lost, 'attempt')} lost to machinery; the same command tries again"
        )
    stderr().print(f"{counted(num_rated, 'solve rate')}: {out}", soft_wrap=True, markup=False)
    stderr().print(
        f"next: swerl tasks filter {out} --solve-rate 0.1..0.9 -o some.jsonl",
        soft_wrap=True,
        markup=False,
    )


def _wanted(tasks: Path, instance: Sequence[str]) -> list[Task]:
    from swerl.cli._task_file import tasks_in
    from swerl.core.task import find_task

    found = tasks_in(tasks)
    return [find_task(found, name) for name in instance] or found


def _run(
    recipe: Recipe, tasks: list[Task], runs: Path, attempts: int, engine: EngineChoice
) -> Mapping[str, Probed]:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from swerl.cli._output import stderr
    from swerl.cli._probe_run import run_probe
    from swerl.cli._run import run
    from swerl.core.events import Event, Notice

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as progress:
        bar = progress.add_task("tasks", total=len(tasks))

        def heard(event: Event) -> None:
            if isinstance(event, Notice):
                progress.console.print(event.text, markup=False)

        work = run_probe(
            recipe,
            tasks,
            runs / recipe.name,
            num_attempts=attempts,
            script=engine.script,
            tell=lambda _: progress.advance(bar),
            emit=heard,
        )
        return run(work, after="every sandbox is closed, and the same command goes on from here")


def _table(found: Mapping[str, Probed]) -> Table:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    titles = ("task", "solved", "attempts", "lost", "tokens", "turns", "seconds")
    table = Table(box=SIMPLE, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == "task" else "right", overflow="fold")
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
