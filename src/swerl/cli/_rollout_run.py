"""One Episode without a trainer: recipe and Task in, Episode and its folder out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swerl import assemble, patch
from swerl.chat import Message
from swerl.episode import Episode
from swerl.errors import TaskError
from swerl.gateway.sessions import TurnRecord
from swerl.interfaces import EngineSetup, Harness
from swerl.recipe.schema import Recipe
from swerl.rollout import episode, record
from swerl.run.events import Emit
from swerl.run.files import disk_errors
from swerl.task import Task

GOLD, NOOP = "gold", "noop"


async def attempt(
    recipe: Recipe, task: Task, folder: Path, *, script: str | None, emit: Emit
) -> Episode:
    """Attempt the Task once and keep everything in `folder`; `script` is `gold`, `noop` or none.

    Raises TaskError for `gold` where the Task has no known solution.
    """
    harness = assemble.plugin(recipe, "harness")
    said = None if script is None else replies(script, harness, task)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    family = assemble.family_of(recipe, recipe.model.path)
    setup = EngineSetup(
        family=family,
        log_dir=folder,
        model=recipe.model.path,
        script=None if said is None else lambda _: said,
    )
    turns: list[TurnRecord] = []
    await assemble.reap_leftovers(recipe, emit)
    async with (
        assemble.plugin(recipe, "engine", setup) as engine,
        assemble.gateway_of(recipe, engine, setup, emit) as gateway,
    ):
        parts = replace(assemble.parts_of(recipe, gateway, emit), on_turn=turns.append)
        result = await episode.run(task, f"{task.id}.0", parts)
    record.write_transcript(folder, turns)
    record.write(folder, result)
    return result


def replies(script: str, harness: Harness, task: Task) -> Sequence[Message]:
    """Return the lines of a script for a Task. Raises TaskError where it has no known solution."""
    if script == NOOP:
        return harness.script([], task.workdir)
    if not task.gold_patch:
        message = f"{task.id} brings no known solution for scripted:gold"
        raise TaskError(message, hint="use --engine scripted:noop, or a model")
    return harness.script(patch.edits(task.gold_patch), task.workdir)
