"""Many attempts without a trainer: recipe and Tasks in, what they came to out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from swerl.checks.solve_rate import Probed, probe
from swerl.cli._rollout_run import replies
from swerl.core.certificate import row_digest
from swerl.core.chat import Message
from swerl.core.contracts import EngineSetup
from swerl.core.events import Emit
from swerl.core.task import Task
from swerl.recipe.schema import Recipe
from swerl.rollout import wiring
from swerl.runs.layout import open_run


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
            return await probe(tasks, parts, folder, num_attempts=num_attempts, tell=tell)


def _script(name: str, recipe: Recipe, tasks: Sequence[Task]) -> Callable[[str], Sequence[Message]]:
    """Return what gives each session its lines; its id begins with the digest of its Task's row."""
    harness = wiring.harness_of(recipe)
    known = {row_digest(task): replies(name, harness, task) for task in tasks}
    return lambda session: known[session.partition("/")[0]]
