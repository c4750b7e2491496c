"""`swerl train`: a Machine in its run folder, opened again where a rank is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swerl.core.errors import RankLostError
from swerl.core.events import Emit, Notice, fan_out
from swerl.core.files import disk_errors
from swerl.recipe.schema import Recipe
from swerl.rollout.wiring import reap_leftovers, tasks_of
from swerl.runs import history
from swerl.runs.history import EventLog, History
from swerl.runs.layout import RunFolder, open_run
from swerl.runs.presence import Presence, present
from swerl.runs.standing import require_alone
from swerl.training import loop
from swerl.training.accounts import Accounts
from swerl.training.machine import open_machine
from swerl.training.metrics import open_sinks
from swerl.training.picture import draw


async def train(recipe: Recipe, root: Path, show: Emit) -> History:
    """Run a recipe in its run folder to the end, or on from where it stands."""
    if recipe.tasks.source != "twin" and not root.exists():
        await asyncio.to_thread(tasks_of, recipe, root)  # what is refused leaves no run behind
    await require_alone(root, tell=lambda text: show(Notice(text)))
    with open_run(root, recipe.model_dump(mode="json")) as folder, EventLog(folder.events) as log:
        if folder.read_state().finished:
            return history.read(folder.events)
        with open_sinks(recipe, root, fan_out(log, show)) as sinks:
            accounts = Accounts(recipe, fan_out(log, show, sinks), history.read(folder.events))
            async with present(root) as presence:
                await reap_leftovers(recipe, accounts)
                past = await _despite_deaths(recipe, folder, accounts, presence)
    with disk_errors(root):
        draw(root, past)
    return past


async def _despite_deaths(
    recipe: Recipe, folder: RunFolder, accounts: Accounts, presence: Presence
) -> History:
    """Train to the end; where a rank is lost, start again as often as the recipe allows."""
    left = recipe.trainer.restarts
    while True:
        try:
            async with open_machine(recipe, folder, accounts, presence) as machine:
                return await loop.run(machine)
        except (RankLostError, ExceptionGroup) as error:
            if not left or not _is_a_lost_rank(error):
                raise
            left -= 1
            told = f"{error}; starting again from the last checkpoint; restarts left: {left}"
            accounts(Notice(told))


def _is_a_lost_rank(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_a_lost_rank(each) for each in error.exceptions)
    return isinstance(error, RankLostError)
