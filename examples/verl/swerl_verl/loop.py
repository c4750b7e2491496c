"""An agent loop of verl: a row's Task in, the exact tokens of one swerl Episode out.

verl names the class in the file of `rollout.agent.agent_loop_config_path`; README.md shows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import WeakKeyDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from swerl.core.contracts import EngineSetup
from swerl.core.episode import Episode
from swerl.core.events import Event, Notice
from swerl.core.task import Task
from swerl.recipe.schema import Recipe
from swerl.rollout import group, record, wiring
from swerl.rollout.parts import Parts
from swerl_verl import rows
from swerl_verl.engine import VerlEngine

_LOG = logging.getLogger("swerl_verl")


@register("swerl")
class SwerlAgentLoop(AgentLoopBase):
    """Runs an Episode of the Task in a row that `swerl convert --format verl-parquet` wrote."""

    def __init__(self, *args: Any, recipe: str, episodes: str = "", **kwargs: Any) -> None:
        """Read `recipe`, the path of a recipe; Episodes are recorded in the folder `episodes`.

        Raises InputError on settings with which verl would train on wrong numbers.
        """
        super().__init__(*args, **kwargs)
        self._recipe = rows.recipe_of(self.config, recipe)
        self._episodes = Path(episodes) if episodes else None

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Return one output per row of the Episode, each with the whole reward.

        An Episode that infrastructure lost has none: verl then leaves the rollout out. Raises
        TaskError on a row without a Task.
        """
        service = _running_service(self._recipe, self.server_manager)
        episode = await service.attempt(rows.task_of(row), sampling_params)
        if self._episodes:
            record.write(self._episodes / Path(episode.id).name, episode)
        fields = rows.outputs_of(episode, self.rollout_config.prompt_length)
        return [AgentLoopOutput(**values) for values in fields]


async def close() -> None:
    """Close the gateway of this event loop, if it is open."""
    if service := _SERVICES.pop(asyncio.get_running_loop(), None):
        await service.close()


class _Service:
    """One gateway and sandbox backend for all agent loops of one event loop.

    A task of its own opens and closes them, because verl may cancel any call, also the first.
    """

    def __init__(self, recipe: Recipe, client: Any) -> None:
        self._recipe = recipe
        self._client = client
        self._numbers = count()
        self._ending = asyncio.Event()
        self._opened: asyncio.Future[Parts] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._hold_open())

    async def attempt(self, task: Task, sampling_params: Mapping[str, Any]) -> Episode:
        """Run an Episode, with the recipe's refills if infrastructure loses it."""
        recipe = rows.with_sampling(self._recipe, sampling_params)
        # A cancelled caller must not cancel an opening that others wait for.
        parts = replace(await asyncio.shield(self._opened), rollout=recipe.rollout)
        name = f"verl/{task.id.replace('/', '_')}.{next(self._numbers)}"
        async with parts.sandboxes.slot:
            return await group.run_with_refills(task, name, parts)

    async def close(self) -> None:
        """Close everything; a second call does nothing."""
        self._ending.set()
        with suppress(Exception):  # Callers of `attempt` have received it.
            await self._owner

    async def _hold_open(self) -> None:
        recipe = self._recipe
        try:
            async with AsyncExitStack() as stack:
                family = wiring.family_of(recipe, recipe.model.path)
                logs = Path(mkdtemp(prefix="swerl-verl-"))
                setup = EngineSetup(family=family, log_dir=logs, model=recipe.model.path)
                # A killed process may have left sandboxes behind.
                await wiring.reap_leftovers(recipe, _log_notice)
                gateway = await stack.enter_async_context(
                    wiring.gateway_of(recipe, VerlEngine(self._client), setup, _log_notice)
                )
                self._opened.set_result(wiring.parts_of(recipe, gateway, _log_notice))
                await self._ending.wait()
        except BaseException as error:
            # Callers that wait for the parts receive the reason.
            if not self._opened.done():
                self._opened.set_exception(error)
            raise


_SERVICES: WeakKeyDictionary[asyncio.AbstractEventLoop, _Service] = WeakKeyDictionary()
"""Open services: verl makes one agent loop per rollout, so the shared parts are stored here."""


def _running_service(recipe: Recipe, client: Any) -> _Service:
    """Return the service of the running event loop; the first call opens it."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVICES:
        _SERVICES[loop] = _Service(recipe, client)
    return _SERVICES[loop]


def _log_notice(event: Event) -> None:
    if isinstance(event, Notice):
        _LOG.warning("%s", event.text)
