"""`swerl rollout`: one Episode with everything shown while it happens, and kept afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swerl.cli._engine_option import EngineChoice, kinds, read_engine, recipe_of

if TYPE_CHECKING:
    from swerl.core.episode import Episode
    from swerl.core.task import Task
    from swerl.recipe.schema import Recipe

_SETTINGS = (
    "name=rollout",
    "rollout.max_turns=200",
    "limits.memory_mib=4096",
    "limits.num_processes=512",
    "limits.num_cpus=2",
    "limits.disk_mib=4096",
)
"""One Episode is looked at, not trained on: the sandbox is that of a real repository."""
_SCRIPTS = ("gold", "noop")
_ARTEFACTS = {
    "transcript": "transcript.json",
    "patch": "patch.diff",
    "grade": "grade.json",
    "agent log": "agent.log",
    "records": "agent.records.jsonl",
    "tokens": "trajectory.json",
}


def rollout(
    instance: Annotated[
        str | None, typer.Option(help="Id of the task; the first one by default.")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="JSONL file written by `swerl convert`; generated tasks by default."),
    ] = None,
    agent: Annotated[
        str, typer.Option(help="An agent: builtin, claude-code, codex, …")
    ] = "builtin",
    engine: Annotated[str, typer.Option(help=f"{kinds(_SCRIPTS)}.")] = "scripted:gold",
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a model or of a run; for openai=URL the model's name there."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe key."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for what the episode leaves.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Attempt one task once, show everything, and say the verdict."""
    chosen = _read_engine(engine)
    recipe = _recipe(agent, chosen, model, settings or ())
    task = _find(instance, tasks)
    if tasks is not None:
        _warn_uncertified(task)
    folder = output or _new_folder(task)
    if as_json:
        episode = _attempt(recipe, task, folder, chosen, view=None)
        _print_json(episode, folder)
    else:
        episode = _show(recipe, task, folder, chosen)
    if episode.verdict in {"infra", "invalid"}:
        raise typer.Exit(1)


def _read_engine(text: str) -> EngineChoice:
    return read_engine(text, _SCRIPTS)


def _recipe(agent: str, engine: EngineChoice, model: str | None, settings: Sequence[str]) -> Recipe:
    """Return the recipe of one Episode. Raises RecipeError and UnknownNameError."""
    made = [*_SETTINGS, f"harness.type={agent}"]
    return recipe_of(engine, model, made=made, settings=settings)


def _find(instance: str | None, file: Path | None) -> Task:
    """Return the Task. Raises TaskError on a bad file, UnknownNameError with the nearest ids."""
    from swerl.cli._task_file import tasks_in
    from swerl.core.task import find_task

    # The first task does not depend on the number that is generated.
    count = 1 if instance is None else None
    tasks = _generated(count) if file is None else tasks_in(file)
    return tasks[0] if instance is None else find_task(tasks, instance)


def _warn_uncertified(task: Task) -> None:
    """Say so where a Task of a file may be broken; generated ones are right as they are made."""
    from swerl.cli._output import stderr
    from swerl.core.certificate import objection

    if task.dataset != "twin" and (why := objection(task)):
        text = f"warning: {task.id} is not certified: {why}; `swerl tasks vet` proves tasks"
        stderr().print(text, style="yellow", markup=False, soft_wrap=True)


def _generated(count: int | None) -> list[Task]:
    """Return held-out generated tasks; None for the number that recipes evaluate on."""
    from swerl.core.secrets import cache_dir
    from swerl.recipe.schema import TasksSection
    from swerl.tasks import twin

    count = count or TasksSection().num_heldout
    return twin.make_tasks(cache_dir() / "tasks" / "twin", split="heldout", count=count, seed=0)


def _new_folder(task: Task) -> Path:
    """Return a folder that no earlier Episode of this Task has."""
    base = Path("runs", "rollouts")
    name = task.id.replace("/", "_")
    taken = {path.name for path in base.glob(f"{name}.*")} if base.is_dir() else set()
    number = next(n for n in range(len(taken) + 1) if f"{name}.{n}" not in taken)
    return base / f"{name}.{number}"


def _show(recipe: Recipe, task: Task, folder: Path, engine: EngineChoice) -> Episode:
    from swerl.cli._rollout_view import RolloutView, show_end, show_start

    show_start(task.id, agent=recipe.harness.type, engine=engine.text, trainable=engine.trainable)
    with RolloutView(trainable=engine.trainable) as view:
        episode = _attempt(recipe, task, folder, engine, view=view)
    show_end(episode, _kept(folder), _next_command(episode, task, engine, folder))
    return episode


def _attempt(
    recipe: Recipe, task: Task, folder: Path, engine: EngineChoice, *, view: Any
) -> Episode:
    from swerl.cli._rollout_run import attempt
    from swerl.cli._run import run
    from swerl.core.events import ignore

    return run(
        attempt(recipe, task, folder, script=engine.script, emit=view or ignore),
        after="nothing of this episode goes on",
    )


def _next_command(episode: Episode, task: Task, engine: EngineChoice, folder: Path) -> str:
    if episode.verdict in {"infra", "invalid"}:
        return "swerl doctor"
    if engine.script == "gold" and episode.verdict == "solved" and task.dataset == "twin":
        return "swerl train recipes/twin_cpu.toml"
    return f"less {folder / _ARTEFACTS['transcript']}"


def _print_json(episode: Episode, folder: Path) -> None:
    trajectory = episode.trajectory
    typer.echo(
        json.dumps(
            {
                "instance": episode.task_id,
                "verdict": episode.verdict,
                "reason": episode.grade.reason,
                "reward": episode.reward if episode.learnable else None,
                "status": episode.status,
                "turns": len(trajectory.turns),
                "trainable": all(turn.trainable for turn in trajectory.turns),
                "sampled_tokens": trajectory.num_sampled_tokens,
                "timings": dict(episode.timings),
                "artefacts": {name: str(path) for name, path in _kept(folder).items()},
            }
        )
    )


def _kept(folder: Path) -> dict[str, Path]:
    """Return what the Episode left; not every agent writes its session down."""
    paths = {name: folder / file for name, file in _ARTEFACTS.items()}
    return {name: path for name, path in paths.items() if path.exists()}
