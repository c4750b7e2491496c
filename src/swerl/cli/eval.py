"""`swerl eval`: score engines, checkpoints and agents, compare two scores; `tasks solve-rate`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from swerl.cli._options import (
    LIMITS,
    AgentOption,
    AttemptsOption,
    EngineChoice,
    JsonOption,
    ModelOption,
    RecipeSettingsOption,
    RunsOption,
    kinds,
    read_engine,
    recipe_of,
    require_made_from,
    tasks_in,
)
from swerl.cli._output import console, counted, print_json, safe, simple_table, stderr
from swerl.cli._run import progress_bar, run, waiting
from swerl.cli.rollout import replies
from swerl.cli.tasks_select import TasksArgument
from swerl.core.certificate import row_digest
from swerl.core.chat import Message
from swerl.core.contracts import EngineSetup
from swerl.core.errors import InputError
from swerl.core.events import Event, Notice
from swerl.core.plugins import short
from swerl.core.secrets import without_logins
from swerl.core.task import Task, find_task
from swerl.recipe.schema import Recipe
from swerl.rollout import wiring
from swerl.rollout.evaluation import Evaluated, report_of, write, write_rates
from swerl.runs import evaluation
from swerl.runs.layout import RunFolder, open_run

_SCRIPTS = ("gold", "noop")
_NUM_SHOWN = 100
"""Tasks of a table of solve rates."""


def evaluate(
    tasks: TasksArgument,
    *,
    engine: Annotated[list[str], typer.Option(help=f"{kinds(_SCRIPTS)}; may be repeated.")],
    agent: Annotated[
        list[str], typer.Option(help="An agent: builtin, claude-code, …; may be repeated.")
    ] = ["builtin"],  # noqa: B006  read only
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model or run folder, or openai's model name; may be repeated."),
    ] = None,
    attempts: AttemptsOption = 1,
    settings: RecipeSettingsOption = None,
    price: Annotated[
        tuple[float, float],
        typer.Option(metavar="IN OUT", help="Dollars per million prompt and sampled tokens."),
    ] = (0.0, 0.0),
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Attempt each task k times; print solve rates with intervals and costs.

    Each agent runs with each engine and model. The same command resumes, and more attempts add
    to fewer.
    """
    task_list = tasks_in(tasks)
    is_named = bool(model) and len(engine) == 1  # by the model alone
    called = {kind: "" if is_named else without_logins(kind) for kind in engine}
    policies = [
        _policy(f"eval-{tasks.stem}-{short(who)}-{called[kind]}-{name}", who, kind, name, settings)
        for who, kind, name in product(agent, engine, model or [""])
    ]
    if len({recipe.name for _, recipe in policies}) < len(policies):
        raise InputError("two of the policies have one name", hint="leave out --set name=…")
    reports = []
    for kind, recipe in policies:
        folder = RunFolder(runs / recipe.name)
        outcome = attempt_all(recipe, task_list, folder.root, kind, attempts)
        report = report_of(outcome, recipe, k=attempts, engine=kind.text, price=price)
        write(folder, "eval", outcome, report)
        reports.append({**report, "path": str(folder.evaluation("eval"))})
    (print_json if as_json else _print)(reports)
    if not all(report["num_attempts"] for report in reports):
        raise typer.Exit(1)


def compare(
    a: Annotated[
        str, typer.Argument(help="The baseline: a file, a run's name or folder, or RUN@STEP.")
    ],
    b: Annotated[str, typer.Argument(help="The evaluation that is compared with it.")],
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations task by task; RUN@STEP names one inside a training run."""
    comparison = evaluation.compare(evaluation.find(a, runs), evaluation.find(b, runs))
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison)


def attempt_all(
    recipe: Recipe,
    tasks: Sequence[Task],
    root: Path,
    engine: EngineChoice,
    attempts: int,
) -> Evaluated:
    """Attempt each Task in the run folder at `root`, and show the progress.

    Raises RecipeError if the folder belongs to another recipe, TaskError for the script `gold` if a
    Task has no known solution.
    """
    from swerl.rollout.evaluation import evaluate

    def emit(event: Event) -> None:
        if isinstance(event, Notice):
            stderr().print(event.text, markup=False)

    async def work(advance: Callable[..., None]) -> Evaluated:
        with open_run(root, recipe.model_dump(mode="json")) as folder:
            setup = EngineSetup(
                family=wiring.family_of(recipe, recipe.model.path),
                log_dir=folder.new_attempt(),
                model=recipe.model.path,
                script=None if engine.script is None else _script(engine.script, recipe, tasks),
            )
            await wiring.reap_leftovers(recipe, emit)
            async with (
                wiring.engine_of(recipe, setup) as opened,
                wiring.gateway_of(recipe, opened, setup, emit) as gateway,
            ):
                parts = wiring.parts_of(recipe, gateway, emit)
                return await evaluate(
                    *(tasks, parts, folder),
                    num_attempts=attempts,
                    on_done=lambda count: advance(advance=count),
                )

    with waiting(f"preparing the agent {recipe.agents[0].type}"):
        wiring.harness_of(recipe).mounts()
    with progress_bar("attempts", len(tasks) * attempts) as advance:
        return run(work(advance), after="every sandbox is closed, and the same command resumes")


def _script(name: str, recipe: Recipe, tasks: Sequence[Task]) -> Callable[[str], Sequence[Message]]:
    """Return each session's replies; a session id begins with the digest of its Task's row."""
    harness = wiring.harness_of(recipe)
    scripts = {row_digest(task): replies(name, harness, task) for task in tasks}
    return lambda session: scripts[session.partition("/")[0]]


def solve_rate(
    tasks: TasksArgument,
    *,
    engine: Annotated[str, typer.Option(help=f"{kinds(_SCRIPTS)}.")],
    attempts: AttemptsOption = 8,
    agent: AgentOption = "builtin",
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
    runs: RunsOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Attempt each task several times, and write its solve rate into its row.

    The same command resumes after an interruption, and more attempts add to fewer.
    """
    chosen, recipe = _policy(f"probe-{tasks.stem}-{agent}", agent, engine, model, settings)
    out = out or tasks.with_name(f"{tasks.stem}.probed.jsonl")
    if out.resolve() == tasks.resolve():
        hint = "name another file with -o: the original is needed to attempt again"
        raise InputError(f"{out} is the task file itself", hint=hint)
    every = tasks_in(tasks)
    require_made_from(out, [task.id for task in every])
    selection = [find_task(every, name) for name in instance or ()] or every
    results = attempt_all(recipe, selection, runs / recipe.name, chosen, attempts).results
    policy = {"agent": agent, "engine": chosen.text, "model": model or ""}
    num_rated = write_rates(tasks, out, results, policy)
    if as_json:
        print_json([{"task": name, **rate.solve_rate} for name, rate in results.items()])
    else:
        titles = ("solved", "attempts", "lost", "tokens", "turns", "seconds")
        table = simple_table("task", *titles, numbers=titles)
        for name, rate in list(results.items())[:_NUM_SHOWN]:
            solved = f"{rate.value:.0%}" if rate.attempts else ""
            means = (f"{rate.solve_rate[name]:,.1f}" for name in titles[3:])
            table.add_row(safe(name), solved, str(rate.attempts), str(rate.num_lost or ""), *means)
        console().print(table)
    _warn_of_lost(sum(rate.num_lost for rate in results.values()))
    stderr().print(f"{counted(num_rated, 'solve rate')}: {out}", soft_wrap=True, markup=False)
    stderr().print(
        f"next: swerl tasks filter {out} --solve-rate 0.1:0.9 -o some.jsonl",
        soft_wrap=True,
        markup=False,
    )
    if num_rated < len(results):
        raise typer.Exit(1)


def _policy(
    words: str, agent: str, engine: str, model: str | None, settings: Sequence[str] | None
) -> tuple[EngineChoice, Recipe]:
    """Return the engine and recipe of a policy named by words. Raises InputError, RecipeError."""
    chosen = read_engine(engine, _SCRIPTS)
    name = re.sub(r"[^A-Za-z0-9._]+", "-", words).strip("-")
    defaults = [*LIMITS, f"name={name}", f"harness.type={agent}"]
    return chosen, recipe_of(chosen, model or None, defaults=defaults, settings=settings or ())


def _print(reports: Sequence[Mapping[str, Any]]) -> None:
    k = max(report["k"] for report in reports)
    counts = ("tasks", "attempts", "lost", "noise", "tokens", "$", "seconds")
    numbers = ("pass@1", f"pass@{k}" if k > 1 else "", *counts)
    table = simple_table("policy", *numbers, numbers=numbers)
    for report in reports:
        count = max(report["num_attempts"], 1)
        table.add_row(
            safe(report["name"]),
            _interval(report["pass_at_1"]),
            _interval(report["pass_at_k"]) if k > 1 else "",
            str(report["pass_at_1"]["num_tasks"]),
            str(report["num_attempts"]),
            str(report["num_lost"] or ""),
            _number(report["noise_floor"], "±{:.1%}"),
            f"{(report['prompt_tokens'] + report['sampled_tokens']) / count:,.0f}",
            _number(report["dollars"], "{:.2f}"),
            f"{report['seconds'] / count:.1f}",
        )
    console().print(table)
    for report in reports:
        verdicts = ", ".join(f"{n} {name}" for name, n in sorted(report["verdicts"].items()))
        console().print(f"{safe(report['name'])}: {verdicts}", soft_wrap=True)
        if report["missing"]:
            missing = ", ".join(report["missing"])
            console().print(f"  the engine gives no {missing}: no attempt can be trained on")
        _warn_of_lost(report["num_lost"])
        stderr().print(f"report: {report['path']}", soft_wrap=True, markup=False)
    folders = [shlex.quote(str(Path(report["path"]).parents[1])) for report in reports]
    a, b, *_ = *folders, "OTHER"
    stderr().print(f"next: swerl eval compare {a} {b}", soft_wrap=True, markup=False)


def _print_comparison(result: Mapping[str, Any]) -> None:
    out = console()
    out.print(f"A = {safe(result['a'])}\nB = {safe(result['b'])}", soft_wrap=True)
    numbers = ("tasks", "A", "B", "B - A", "p", "B better", "A better")
    table = simple_table("repository", *numbers, numbers=numbers)
    for row in [*(result["repos"] if result["repos"][1:] else []), {**result, "repo": "all"}]:
        a, b = (f"{mean:.1%}" for mean in row["pass_at_1"])
        change = (_interval(row["difference"], "+"), f"{row['p_value']:.3g}")
        won = (str(row["num_b_better"]), str(row["num_a_better"]))
        table.add_row(safe(row["repo"] or "unknown"), str(row["num_tasks"]), a, b, *change, *won)
    out.print(table)
    floor = _number(result["noise_floor"], "{:.1%}") or "unknown without two attempts on both sides"
    out.print(f"noise floor, the most that two evaluations of one policy differ by: {floor}")
    for name, cost in result["cost"].items():
        if cost["a"] is not None and cost["b"] is not None:
            point = _number(cost["per_point"], "; {:+,.4g} for each point gained")
            out.print(f"{name} an attempt: {cost['a']:,.4g} → {cost['b']:,.4g}{point}")
    only = f"{result['num_only_a']} tasks only in A, {result['num_only_b']} only in B"
    lost = "{} in A, {} in B".format(*result["num_lost_tasks"])
    out.print(f"not paired: {only}; all attempts lost: {lost}", soft_wrap=True)


def _interval(estimate: Mapping[str, Any], sign: str = "") -> str:
    percents = (f"{100 * estimate[name]:{sign}.1f}" for name in ("mean", "low", "high"))
    return "{} ({} … {})".format(*percents)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _warn_of_lost(number: int) -> None:
    if number:
        lost = counted(number, "attempt")
        stderr().print(f"{lost} lost to the infrastructure; the same command tries again")
