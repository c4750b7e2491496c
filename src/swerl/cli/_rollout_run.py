"""Run one Episode without a trainer and write it to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from swerl.core import patch
from swerl.core.chat import Message
from swerl.core.contracts import EngineSetup, Harness
from swerl.core.episode import Episode
from swerl.core.errors import TaskError
from swerl.core.events import Emit
from swerl.core.files import disk_errors
from swerl.core.task import Task
from swerl.gateway.conversation import TurnRecord
from swerl.recipe.schema import Recipe
from swerl.rollout import episode, record, wiring

GOLD, NOOP = "gold", "noop"


async def attempt(
    recipe: Recipe, task: Task, folder: Path, *, script: str | None, emit: Emit
) -> Episode:
    """Attempt the Task once and write the Episode to `folder`; `script` is `gold`, `noop` or none.

    Raises TaskError for `gold` if the Task has no known solution.
    """
    harness = wiring.harness_of(recipe)
    said = None if script is None else replies(script, harness, task)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    family = wiring.family_of(recipe, recipe.model.path)
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
    record.write_transcript(folder, turns)
    record.write(folder, result)
    return result


def replies(script: str, harness: Harness, task: Task) -> Sequence[Message]:
    """Return the replies of a script. Raises TaskError if the Task has no known solution."""
    if script == NOOP:
        return harness.script([], task.workdir)
    if not task.gold_patch:
        raise TaskError(
            f"{task.id} has no known solution for scripted:gold",
            hint="use --engine scripted:noop, or a model",
        )
    return harness.script(patch.edits(task.gold_patch), task.workdir)
