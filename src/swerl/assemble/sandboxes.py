"""The sandboxes of a Recipe: its backend with images and ledger, and what a killed start left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel

from swerl.cluster.node import Node
from swerl.cluster.sandbox_servers import serve_sandboxes
from swerl.images.ondemand import on_demand
from swerl.interfaces import SandboxBackend
from swerl.ledger import reap
from swerl.ledger.store import default_ledger
from swerl.ledger.tracked import tracked
from swerl.recipe.check import plugin_options
from swerl.recipe.schema import Recipe
from swerl.run.events import Emit, Notice


def sandbox_backend(recipe: Recipe, emit: Emit) -> SandboxBackend:
    """Build what the recipe's sandbox section names."""
    options = plugin_options("sandboxes", recipe.sandbox, section="sandbox")
    return open_backend(
        recipe.sandbox.type, options, run=recipe.name, warn=lambda text: emit(Notice(text))
    )


@asynccontextmanager
async def open_sandboxes(
    recipe: Recipe, nodes: Sequence[Node], *, logs: Path, emit: Emit
) -> AsyncIterator[SandboxBackend]:
    """Yield the backend of a run: beside the controller, or spread over its nodes.

    A node's server writes its sandboxes into the ledger there.
    """
    if not recipe.cluster.sandbox_cpus:
        yield sandbox_backend(recipe, emit)
        return
    async with serve_sandboxes(nodes, recipe, logs=logs, emit=emit) as spread:
        yield spread


def open_backend(
    backend: str,
    options: BaseModel | None,
    *,
    run: str,
    warn: Callable[[str], None] = lambda _: None,
) -> SandboxBackend:
    """Build a backend that pulls images where its settings say so and writes the ledger.

    `run` says what its sandboxes are used for; `warn` hears what stops nothing.
    """
    return on_demand(tracked(backend, options, run=run, warn=warn), options)


async def reap_leftovers(recipe: Recipe, emit: Emit) -> None:
    """Remove the sandboxes that a killed start of the same run left, and say so."""
    left = await reap.reap_leftovers(default_ledger(), recipe.name)
    removed = sum(each.outcome is reap.Outcome.REMOVED for each in left)
    if removed:
        emit(Notice(f"removed {removed} sandboxes that an earlier start left"))
    problems = [each.problem for each in left if each.outcome is reap.Outcome.FAILED]
    if problems:
        emit(
            Notice(
                f"{len(problems)} sandboxes of an earlier start are left: {problems[0]}; "
                "mend that, then `swerl sandbox reap`"
            )
        )
