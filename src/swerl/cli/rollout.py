"""`swerl rollout`: run one Episode, print it live, and keep its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress as RichProgress

from swerl.cli._options import (
    EngineChoice,
    JsonOption,
    ModelOption,
    RecipeSettingsOption,
    kinds,
    read_engine,
    recipe_of,
    tasks_in,
)
from swerl.cli._output import console, counted, print_json, safe, stderr
from swerl.cli._run import run, waiting
from swerl.core.certificate import objection
from swerl.core.changes import edits, touched
from swerl.core.chat import Message
from swerl.core.contracts import EngineSetup, Harness
from swerl.core.episode import Episode
from swerl.core.errors import InputError, TaskError, unknown
from swerl.core.events import (
    Emit,
    EpisodeEnded,
    Event,
    Notice,
    PhaseEnded,
    PhaseStarted,
    Progress,
    TurnEnded,
    ignore,
)
from swerl.core.files import disk_errors, write_json
from swerl.core.grade import LEARNABLE, TestStatus, Verdict
from swerl.core.secrets import cache_dir
from swerl.core.task import Task, find_task, folder_name, to_row
from swerl.gateway.conversation import TurnRecord
from swerl.recipe.schema import Recipe, TasksSection
from swerl.rollout import episode, record, wiring
from swerl.tasks import twin

_SETTINGS = (
    "name=rollout",
    "rollout.max_turns=200",
    "limits.memory_mib=4096",
    "limits.num_processes=512",
    "limits.num_cpus=2",
    "limits.disk_mib=4096",
)
"""Limits for a real repository: one Episode is inspected, not trained."""
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
        str | None,
        typer.Option(help="Id of a task, or of a real instance: pallets__flask-4045, …"),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="Task file of `swerl convert`, or rows with a real instance."),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="An agent: builtin (default), claude-code, codex, …")
    ] = None,
    engine: Annotated[str, typer.Option(help=f"{kinds(_SCRIPTS)}.")] = "scripted:gold",
    model: ModelOption = None,
    settings: RecipeSettingsOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the episode's files.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Attempt one task once; print every turn, and print the verdict."""
    chosen = read_engine(engine, _SCRIPTS)
    recipe = _recipe(agent, chosen, model, settings or ())
    task = _given(instance, tasks)
    if tasks is not None:
        _warn_uncertified(task)
    folder = output or _new_folder(task)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{folder} exists already", hint="name another folder with -o")
    if as_json:
        episode = _attempt(recipe, task, folder, chosen, view=None)
        _print_json(episode, folder)
    else:
        episode = _show(recipe, task, folder, chosen)
    if episode.verdict in {"infra", "invalid"}:
        raise typer.Exit(2 if episode.fault else 1)


def _recipe(
    agent: str | None, engine: EngineChoice, model: str | None, settings: Sequence[str]
) -> Recipe:
    """Return the recipe of one Episode. Raises RecipeError."""
    settings = [f"harness.type={agent or 'builtin'}", *settings]
    return recipe_of(engine, model, defaults=_SETTINGS, settings=settings)


def _given(instance: str | None, file: Path | None) -> Task:
    """Return the Task of the command line: a real instance, one of a file, or a generated one."""
    if instance and file is None and (task := _real(instance, None)):
        return task
    try:
        return _find(instance, file)
    except TaskError:
        from swerl.images.build import shipped

        # The file may have the rows of a real instance.
        if file and instance in shipped() and (task := _real(instance, file)):
            return task
        raise


def _real(instance: str, rows: Path | None) -> Task | None:
    """Return the Task of an instance that comes with swerl; None for generated ones.

    Raises UnknownNameError with the nearest ids, InputError and ImageError.
    """
    from swerl.images.build import prepare, shipped
    from swerl.tasks.rows import file_rows, hub_rows

    specs = shipped()
    if instance not in specs:
        if instance.startswith("twin"):
            return None
        raise unknown("instance", instance, specs)

    def say(step: str) -> None:
        stderr().print(f"{instance}: {step} …", style="dim", markup=False)

    spec = specs[instance]
    return prepare(spec, file_rows(rows) if rows else hub_rows(spec.dataset, spec.split), say)


def _find(instance: str | None, file: Path | None) -> Task:
    """Return the Task. Raises TaskError on a bad file, UnknownNameError with the nearest ids."""
    if file:
        tasks = tasks_in(file)
    else:
        # The first task does not depend on the number that is generated.
        count = 1 if instance is None else TasksSection().num_heldout
        folder = cache_dir() / "tasks" / "twin"
        tasks = twin.make_tasks(folder, split="heldout", count=count, seed=0)
    return tasks[0] if instance is None else find_task(tasks, instance)


def _warn_uncertified(task: Task) -> None:
    """Warn if a Task of a file is not certified; generated ones need no certificate."""
    if task.dataset != "twin" and (why := objection(task)):
        text = f"warning: {task.id} is not certified: {why}; `swerl tasks vet` proves tasks"
        stderr().print(text, style="yellow", markup=False, soft_wrap=True)


def _new_folder(task: Task) -> Path:
    """Return a new folder for an Episode of this Task."""
    base = Path("runs", "rollouts")
    name = folder_name(task)
    names = {path.name for path in base.glob(f"{name}.*")} if base.is_dir() else set()
    number = next(n for n in range(len(names) + 1) if f"{name}.{n}" not in names)
    return base / f"{name}.{number}"


def _show(recipe: Recipe, task: Task, folder: Path, engine: EngineChoice) -> Episode:
    show_start(task.id, agent=recipe.agents[0].type, engine=engine.text, trainable=engine.trainable)
    with RolloutView(trainable=engine.trainable) as view:
        episode = _attempt(recipe, task, folder, engine, view=view)
    show_end(episode, _kept(folder), _next_command(episode, task, engine, folder))
    return episode


def _attempt(
    recipe: Recipe, task: Task, folder: Path, engine: EngineChoice, *, view: Any
) -> Episode:
    # The first use of an agent downloads it.
    with waiting(f"preparing the agent {recipe.agents[0].type}"):
        wiring.harness_of(recipe).mounts()
    return run(
        attempt(recipe, task, folder, script=engine.script, emit=view or ignore),
        after="the same command attempts the task again, in a new folder",
    )


def _next_command(episode: Episode, task: Task, engine: EngineChoice, folder: Path) -> str:
    if episode.fault:
        return "correct it, and run the same command again"
    if episode.verdict in {"infra", "invalid"}:
        return "swerl doctor"
    if engine.script == "gold" and episode.verdict == "solved" and task.dataset == "twin":
        return "swerl train twin_cpu"
    return f"less {folder / _ARTEFACTS['transcript']}"


def _print_json(episode: Episode, folder: Path) -> None:
    trajectory = episode.trajectory
    print_json(
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


def _kept(folder: Path) -> dict[str, Path]:
    """Return the Episode's files; not every agent writes session files."""
    paths = {name: folder / file for name, file in _ARTEFACTS.items()}
    return {name: path for name, path in paths.items() if path.exists()}


_COLOURS = {
    Verdict.SOLVED: "green",
    Verdict.UNSOLVED: "yellow",
    Verdict.TIMEOUT: "yellow",
    Verdict.CHEAT: "red",
    Verdict.INFRA: "red",
    Verdict.INVALID: "red",
}
_PHASES = {
    "hide_future": "of the boot: later history removed",
    "boot": "sandbox up, agent in it",
    "agent": "agent at work",
    "diff": "patch taken",
    "grade_boot": "clean sandbox up",
    "grade": "patch graded",
    "confirm": "of which a confirming run of the tests",
    "test": "of which tests",
}
_MAX_FAILING = 10
"""Maximum tests listed under a verdict."""


class RolloutView:
    """Prints one Episode's events; on a terminal with a spinner for the current phase."""

    def __init__(self, out: Console | None = None, *, trainable: bool = True) -> None:
        self._out = out or console()
        self._trainable = trainable
        self._status: RichProgress | None = None

    def __enter__(self) -> RolloutView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spin(None)

    def __call__(self, event: Event) -> None:
        """Print one event."""
        match event:
            case PhaseStarted(phase=phase):
                self._spin(_PHASES.get(phase, phase))
            case PhaseEnded(phase=phase, seconds=seconds):
                self._spin(None)
                outcome = _PHASES.get(phase, "") if event.ok else "[red]failed[/]"
                self._out.print(f"[bold]{phase:<10}[/] {seconds:>7.2f} s  {outcome}")
            case TurnEnded():
                self._show_turn(event)
            case Progress():
                self._spin(f"{event.stage} {event.done}/{event.total} {event.note}".rstrip())
            case Notice(text=text):
                self._spin(None)
                self._out.print(text, markup=False, soft_wrap=True)
            case EpisodeEnded():
                self._spin(None)

    def _show_turn(self, turn: TurnEnded) -> None:
        for result in turn.results:
            self._line(f"      [dim]→ {safe(result)}[/]")
        mark = "" if self._trainable else "  [yellow]not trainable[/]"
        self._line(
            f"  [cyan]turn {turn.turn + 1:<3}[/] {turn.prompt_tokens:>7,} tokens in "
            f"{turn.output_tokens:>6,} out {turn.seconds:>6.2f} s{mark}"
        )
        if turn.said:
            self._line(f"      “{safe(turn.said)}”")
        for call in turn.calls:
            self._line(f"      {safe(call)}")

    def _line(self, text: str) -> None:
        self._out.print(text, no_wrap=True, overflow="ellipsis")

    def _spin(self, text: str | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if text is not None and self._out.is_terminal:
            from swerl.cli._run import spinner

            self._status = spinner(self._out)
            self._status.add_task(text)
            self._status.start()


def show_start(task_id: str, *, agent: str, engine: str, trainable: bool) -> None:
    note = "" if trainable else "  [yellow](for debugging: no token ids, not trainable)[/]"
    if engine.startswith("scripted"):
        note = "  [dim](no model: the tokens are bytes, without system prompt and tools)[/]"
    console().print(f"[bold]{safe(task_id)}[/]  {agent} on {safe(engine)}{note}")


def show_end(episode: Episode, artefacts: Mapping[str, Path], next_command: str) -> None:
    """Print the verdict, the files and the next command."""
    out = console()
    trajectory = episode.trajectory
    trained = trajectory.num_sampled_tokens if all(t.trainable for t in trajectory.turns) else 0
    num_branches = len(list(trajectory.leaves()))
    out.print(
        f"\n{counted(len(trajectory.turns), 'turn')}, {trained:,} trainable tokens in "
        f"{counted(num_branches, 'branch', 'branches')}, {episode.timings['total']:.2f} s; "
        f"agent {episode.status}; patch to {counted(len(touched(episode.patch)), 'file')}",
        soft_wrap=True,
    )
    colour = _COLOURS[episode.verdict]
    reward = f"reward {episode.reward:g}" if episode.verdict in LEARNABLE else "no reward"
    title = "" if episode.fault else f"[bold {colour}]{episode.verdict.upper()}[/]  {reward}  "
    out.print(f"{title}{safe(episode.grade.reason)}", soft_wrap=True)
    _show_failing(episode)
    out.print()
    for name, path in artefacts.items():
        out.print(f"{name:<12}{path}", soft_wrap=True)
    out.print(f"{'next':<12}{next_command}", soft_wrap=True)


def _show_failing(episode: Episode) -> None:
    good = {TestStatus.PASSED, TestStatus.XFAIL}
    failing = [(n, s) for n, s in episode.grade.tests.items() if s not in good]
    for name, status in failing[:_MAX_FAILING]:
        console().print(f"  {status:<8} {safe(name)}", soft_wrap=True)
    if len(failing) > _MAX_FAILING:
        console().print(f"  … and {len(failing) - _MAX_FAILING} more in grade.json")


GOLD, NOOP = "gold", "noop"


async def attempt(
    recipe: Recipe, task: Task, folder: Path, *, script: str | None, emit: Emit
) -> Episode:
    """Attempt the Task once and write the Episode to `folder`; `script` is `gold`, `noop` or none.

    Raises TaskError for `gold` if the Task has no known solution.
    """
    harness = wiring.harness_of(recipe)
    said = None if script is None else replies(script, harness, task)
    family = wiring.family_of(recipe, recipe.model.path)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / record.TASK, to_row(task))
    setup = EngineSetup(
        family=family,
        log_dir=folder,
        model=recipe.model.path,
        script=None if said is None else lambda _: said,
    )
    turns: list[TurnRecord] = []
    await wiring.reap_leftovers(recipe, emit)
    async with (
        wiring.engine_of(recipe, setup) as engine,
        wiring.gateway_of(recipe, engine, setup, emit) as gateway,
    ):
        parts = replace(wiring.parts_of(recipe, gateway, emit), on_turn=turns.append)
        result = await episode.run(task, f"{task.id}.0", parts)
    record.write_transcript(folder, turns, family)
    record.write(folder, result)
    return result


def replies(script: str, harness: Harness, task: Task) -> Sequence[Message]:
    """Return the replies of a script. Raises TaskError if the Task has no known solution."""
    if not hasattr(harness, "script"):
        raise InputError(
            "this agent has no `script`, so it cannot follow a scripted engine",
            hint="use a model: --engine torch-cpu, or an address as sglang=URL or openai=URL",
        )
    if script == NOOP:
        return harness.script([], task.workdir)
    if not task.gold_patch:
        raise TaskError(
            f"{task.id} has no known solution for scripted:gold",
            hint="use --engine scripted:noop, or a model",
        )
    return harness.script(edits(task.gold_patch), task.workdir)
