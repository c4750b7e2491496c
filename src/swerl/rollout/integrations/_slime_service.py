"""One gateway, engine client and sandbox backend for all rollouts of a slime process.

slime calls plain functions from one event loop, so what they share is kept by loop. A task of its
own opens and closes it: the call that happens to come first may be cancelled at any time.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import WeakKeyDictionary

from swerl.core.contracts import EngineSetup, Family
from swerl.core.episode import Episode
from swerl.core.events import Event, Notice
from swerl.core.grade import Verdict
from swerl.core.task import Task
from swerl.gateway.sessions import SessionSource
from swerl.rollout import episode, record, wiring
from swerl.rollout.integrations._slime_args import SlimeArgs, SlimeSample, recipe_of, sampled
from swerl.rollout.parts import Parts

_LOG = logging.getLogger("swerl.rollout.integrations.slime")
_CLOSE_S = 60.0
"""Seconds that closing at the process's end may take."""


class Service:
    """What the rollouts of one event loop share."""

    def __init__(self, args: SlimeArgs) -> None:
        """Read the settings. Raises InputError."""
        self._recipe = recipe_of(args)
        self._family = wiring.family_of(self._recipe, self._recipe.model.path)
        kept = getattr(args, "swerl_episodes", None)
        self._kept = Path(kept) if kept else None
        self._logs = Path(mkdtemp(prefix="swerl-slime-"))
        self._numbers = count()
        self._ending = asyncio.Event()
        self._opened: asyncio.Future[Parts] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())

    @property
    def text(self) -> Family:
        """Return who can say what tokens mean."""
        return self._family

    async def parts(self) -> Parts:
        """Return what Episodes share, once it is open. Raises SwerlError where it cannot be."""
        return await asyncio.shield(self._opened)

    async def attempt(
        self, task: Task, sample: SlimeSample, sampling_params: Mapping[str, Any]
    ) -> Episode:
        """Run an Episode; one lost to machinery is tried again as often as the recipe says."""
        recipe = sampled(self._recipe, sampling_params)
        parts = replace(await self.parts(), rollout=recipe.rollout)
        name = f"slime/{task.id.replace('/', '_')}.{sample.index}-{next(self._numbers)}"
        async with parts.provisioner.slot:
            result = await episode.run(task, name, parts)
            for refill in range(recipe.rollout.refills):
                if result.learnable or result.verdict is Verdict.INVALID:
                    break
                result = await episode.run(task, f"{name}+{refill + 1}", parts)
        if self._kept:
            record.write(self._kept / Path(name).name, result)
        return result

    async def close(self) -> None:
        """Close everything, also twice."""
        self._ending.set()
        with suppress(Exception):  # whoever waited for `parts` has heard of it
            await self._keeper

    async def _keep(self) -> None:
        """Hold everything open until `close`."""
        recipe = self._recipe
        setup = EngineSetup(family=self._family, log_dir=self._logs, model=recipe.model.path)
        try:
            async with AsyncExitStack() as stack:
                await wiring.reap_leftovers(recipe, _tell)
                engine = await stack.enter_async_context(wiring.engine_of(recipe, setup))
                gateway: SessionSource = await stack.enter_async_context(
                    wiring.gateway_of(recipe, engine, setup, _tell)
                )
                self._opened.set_result(wiring.parts_of(recipe, gateway, _tell))
                await self._ending.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            raise


_SERVICES: WeakKeyDictionary[asyncio.AbstractEventLoop, Service] = WeakKeyDictionary()


def running_service(args: SlimeArgs) -> Service:
    """Return the service of the running loop, opening it at the first call. Raises InputError."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVICES:
        if not _SERVICES:
            atexit.register(_close_all)
        _SERVICES[loop] = Service(args)
    return _SERVICES[loop]


async def close_service() -> None:
    """Close the service of the running loop, where one is open."""
    if service := _SERVICES.pop(asyncio.get_running_loop(), None):
        await service.close()


def _close_all() -> None:
    """At the process's end, close what loops in other threads still hold open."""
    services: Sequence[tuple[asyncio.AbstractEventLoop, Service]] = list(_SERVICES.items())
    for loop, service in services:
        if loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(service.close(), loop)
            with suppress(TimeoutError):
                closing.result(_CLOSE_S)


def _tell(event: Event) -> None:
    if isinstance(event, Notice):
        _LOG.warning("%s", event.text)
