"""`swerl rollout`: one Episode with everything shown while it happens, and kept afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from swerl.episode import Episode
    from swerl.recipe.schema import Recipe
    from swerl.task import Task

# One Episode is looked at, not trained on: the limits are those of a real agent on a real
# repository, not of the small model that the training defaults are made for.
_SETTINGS = (
    "name=rollout",
    "rollout.max_turns=200",
    "rollout.max_new_tokens=16384",
    "rollout.max_context_tokens=1000000",
    "budgets.model_call_s=600",
    "budgets.tool_s=900",
    "budgets.agent_s=1800",
    "budgets.grading_s=1900",
    "budgets.episode_s=3700",
    "budgets.sandbox_s=7200",
    "limits.memory_mib=4096",
    "limits.num_processes=512",
    "limits.num_cpus=2",
    "limits.disk_mib=4096",
)
_REPLY_SHARE = 4
"""A model's context is this many times its longest reply."""
_DEFAULT_CONTEXT = 32768
"""Tokens, for a model folder that does not say."""
_ARTEFACTS = {
    "transcript": "transcript.json",
    "patch": "patch.diff",
    "grade": "grade.json",
    "agent log": "agent.log",
    "tokens": "trajectory.json",
}
_KINDS = "scripted:gold, scripted:noop, torch-cpu, sglang=URL, or openai=URL to debug"


def rollout(
    instance: Annotated[
        str | None, typer.Option(help="Id of the task; the first one by default.")
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="JSONL file written by `swerl convert`; generated tasks by default."),
    ] = None,
    agent: Annotated[str, typer.Option(help="builtin, claude-code or codex.")] = "builtin",
    engine: Annotated[str, typer.Option(help=f"{_KINDS}.")] = "scripted:gold",
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
    folder = output or _new_folder(task)
    if as_json:
        episode = _attempt(recipe, task, folder, chosen, view=None)
        _print_json(episode, folder)
    else:
        episode = _show(recipe, task, folder, chosen)
    if episode.verdict in {"infra", "invalid"}:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Engine:
    """What `--engine` says."""

    text: str
    type: str
    script: str | None = None
    url: str | None = None

    @property
    def trainable(self) -> bool:
        """Whether it tells the tokens that it samples."""
        return self.type != "openai"


def _read_engine(text: str) -> _Engine:
    from swerl import plugins
    from swerl.errors import InputError, unknown

    if match := re.fullmatch(r"scripted:(gold|noop)", text):
        return _Engine(text, "scripted", script=match[1])
    if match := re.fullmatch(r"(sglang|openai)=(https?://\S+)", text):
        return _Engine(text, match[1], url=match[2])
    known = list(plugins.names("engines"))
    if text in set(known) - {"scripted", "openai"}:
        return _Engine(text, text)
    name = re.split("[:=]", text)[0]
    if name not in known:
        raise unknown("engine", name, known)
    message = f"--engine {text!r} is not an engine"
    raise InputError(message, hint=f"use {_KINDS}")


def _recipe(agent: str, engine: _Engine, model: str | None, settings: Sequence[str]) -> Recipe:
    """Return the recipe of one Episode. Raises RecipeError and UnknownNameError."""
    from swerl.recipe.check import check
    from swerl.recipe.load import load

    made = [*_SETTINGS, f"harness.type={agent}", f"engine.type={engine.type}"]
    if engine.type == "openai":
        made += [f"engine.base_url={engine.url}", f"engine.model={model or 'default'}"]
    else:
        made += [f"engine.url={engine.url}"] if engine.url else []
        made += _model_settings(engine, model)
    recipe = load([], [*made, *settings])
    check(recipe)
    return recipe


def _model_settings(engine: _Engine, model: str | None) -> list[str]:
    """Return where the model lies and what fits its context."""
    from swerl.errors import InputError

    if model is None:
        if engine.type == "scripted":
            return []
        message = f"--engine {engine.text} needs --model with the model's folder"
        raise InputError(message, hint="a run's folder will do: its newest weights are taken")
    folder = _newest_weights(Path(model))
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        message = f"--model {model} holds no model: {error}"
        raise InputError(message, hint="give a folder in Hugging Face format, or a run") from error
    context = int(config.get("max_position_embeddings", _DEFAULT_CONTEXT))
    return [
        f"model.path={folder}",
        f"rollout.max_context_tokens={context}",
        f"rollout.max_new_tokens={max(context // _REPLY_SHARE, 1)}",
    ]


def _newest_weights(folder: Path) -> Path:
    """Return a run's newest published weights, or the folder itself where it is no run."""
    published = sorted(path for path in folder.glob("weights/*") if path.name.isdigit())
    return published[-1] if published else folder


def _find(instance: str | None, file: Path | None) -> Task:
    """Return the Task. Raises TaskError on a bad file, UnknownNameError with the nearest ids."""
    from swerl.cli._task_file import tasks_in
    from swerl.task import find_task

    tasks = _generated() if file is None else tasks_in(file)
    return tasks[0] if instance is None else find_task(tasks, instance)


def _generated() -> list[Task]:
    """Return the held-out generated tasks that a recipe with default settings evaluates on."""
    from swerl.recipe.schema import TasksSection
    from swerl.secrets import cache_dir
    from swerl.tasks import twin

    count = TasksSection().num_heldout
    return twin.make_tasks(cache_dir() / "tasks" / "twin", split="heldout", count=count, seed=0)


def _new_folder(task: Task) -> Path:
    """Return a folder that no earlier Episode of this Task has."""
    base = Path("runs", "rollouts")
    name = task.id.replace("/", "_")
    taken = {path.name for path in base.glob(f"{name}.*")} if base.is_dir() else set()
    number = next(n for n in range(len(taken) + 1) if f"{name}.{n}" not in taken)
    return base / f"{name}.{number}"


def _show(recipe: Recipe, task: Task, folder: Path, engine: _Engine) -> Episode:
    from swerl.cli._rollout_view import RolloutView, show_end, show_start

    show_start(task.id, agent=recipe.harness.type, engine=engine.text, trainable=engine.trainable)
    with RolloutView(trainable=engine.trainable) as view:
        episode = _attempt(recipe, task, folder, engine, view=view)
    paths = {name: folder / file for name, file in _ARTEFACTS.items()}
    show_end(episode, paths, _next_command(episode, task, engine, folder))
    return episode


def _attempt(recipe: Recipe, task: Task, folder: Path, engine: _Engine, *, view: Any) -> Episode:
    from swerl.cli._rollout_run import attempt
    from swerl.cli._run import run
    from swerl.run.events import ignore

    return run(
        attempt(recipe, task, folder, script=engine.script, emit=view or ignore),
        after="nothing of this episode goes on",
    )


def _next_command(episode: Episode, task: Task, engine: _Engine, folder: Path) -> str:
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
                "artefacts": {k: str(folder / v) for k, v in _ARTEFACTS.items()},
            }
        )
    )
