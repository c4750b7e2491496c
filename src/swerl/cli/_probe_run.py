"""Many attempts without a trainer: recipe and Tasks in, what they came to out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from swerl import assemble
from swerl.certificate import row_digest
from swerl.chat import Message
from swerl.cli._rollout_run import replies
from swerl.interfaces import EngineSetup
from swerl.recipe.schema import Recipe
from swerl.run.events import Emit
from swerl.run.layout import open_run
from swerl.task import Task
from swerl.tasks.probe import Probed, probe


async def run_probe(
    recipe: Recipe,
    tasks: Sequence[Task],
    root: Path,
    *,
    num_attempts: int,
    script: str | None,
    tell: Callable[[Probed], None],
    emit: Emit,
) -> dict[str, Probed]:
    """Attempt each Task in the run folder at `root`, going on where it stands.

    Raises RunError where the folder belongs to another recipe, TaskError for the script `gold`
    where a Task has no known solution.
    """
    with open_run(root, recipe.model_dump(mode="json")) as folder:
        family = assemble.family_of(recipe, recipe.model.path)
        setup = EngineSetup(
            family=family,
            log_dir=folder.new_attempt(),
            model=recipe.model.path,
            script=None if script is None else _script(script, recipe, tasks),
        )
        await assemble.reap_leftovers(recipe, emit)
        async with (
            assemble.plugin(recipe, "engine", setup) as engine,
            assemble.gateway_of(recipe, engine, setup, emit) as gateway,
        ):
            parts = assemble.parts_of(recipe, gateway, emit)
            return await probe(tasks, parts, folder, num_attempts=num_attempts, tell=tell)


def _script(name: str, recipe: Recipe, tasks: Sequence[Task]) -> Callable[[str], Sequence[Message]]:
    """Return what gives each session its lines; its id begins with the digest of its Task's row."""
    harness = assemble.plugin(recipe, "harness")
    known = {row_digest(task): replies(name, harness, task) for task in tasks}
    return lambda session: known[session.partition("/")[0]]
