"""slime's hooks: swerl's agents, sandboxes and grading as the rollouts of a slime run.

slime loads `generate`, `reward`, `normalize` and `keep_group` by their dotted paths, with the flags
of README.md. slime is never imported: its Samples come in as arguments and are copied.
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

from swerl.core.contracts import Attempt, EngineSetup
from swerl.core.episode import Episode, Status
from swerl.core.errors import SwerlError
from swerl.core.events import Event, Notice, ignore
from swerl.core.grade import LEARNABLE, Grade, Verdict
from swerl.core.task import Task
from swerl.core.turn import Trajectory
from swerl.gateway.server import Gateway
from swerl.rollout import episode, group, record, wiring
from swerl.rollout.parts import Clock, Parts
from swerl_slime import samples as convert
from swerl_slime.samples import SlimeArgs, SlimeSample

_LOG = logging.getLogger("swerl_slime")
_MIN_ROLLOUTS = 2
"""Rollouts of a prompt that must remain: fewer cannot be compared."""
_CLOSE_S = 60.0
"""Seconds that closing may take when the process exits."""


async def generate(
    args: SlimeArgs,
    sample: SlimeSample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,
) -> SlimeSample | list[SlimeSample]:
    """Run an Episode of the sample's Task (`--custom-generate-function-path`).

    Returns one sample per row of the Episode, each with the whole reward; one in evaluation. If
    infrastructure lost the Episode, the sample is aborted and removed, and its reward is NaN.
    Raises InputError on unusable settings or rows.
    """
    service = _running_service(args)
    task = convert.task_of(sample)
    result = await service.attempt(task, sample, sampling_params)
    if evaluation:
        return convert.to_eval_sample(sample, result, service.family)
    return convert.to_train_samples(sample, result, args, service.family)


async def reward(
    args: SlimeArgs, sample: SlimeSample | list[SlimeSample], **_: object
) -> float | list[float]:
    """Grade `sample.metadata["patch"]` in a clean sandbox (`--custom-rm-path`).

    For agents of your own: `generate` sets rewards itself. A sample that cannot be graded is
    marked as lost.
    """
    if isinstance(sample, list):
        return [await _reward(args, row) for row in sample]
    return await _reward(args, sample)


def normalize(args: SlimeArgs, samples: Sequence[SlimeSample]) -> tuple[list[float], list[float]]:
    """Return raw rewards and advantages (`--custom-reward-post-process-path`).

    Advantages are per prompt with one vote per rollout, however many samples it became. Rollouts
    that infrastructure lost enter no mean.
    """
    return convert.normalized(args, samples)


def keep_group(
    args: SlimeArgs, group: Sequence[SlimeSample | list[SlimeSample]], **_: object
) -> bool:
    """Return True if a prompt has rollouts to compare (`--dynamic-sampling-filter-path`).

    slime then replaces a prompt whose rollouts infrastructure lost.
    """
    return convert.num_learnable(group) >= _MIN_ROLLOUTS


async def close() -> None:
    """Close the gateway and the engine client of this event loop, if they are open."""
    if service := _SERVICES.pop(asyncio.get_running_loop(), None):
        await service.close()


async def _reward(args: SlimeArgs, sample: SlimeSample) -> float:
    # `generate` has graded the sample.
    if sample.reward is not None:
        return float(sample.reward)
    task, parts = convert.task_of(sample), await _running_service(args).parts()
    async with parts.sandboxes.slot:
        try:
            # No session exists here: the patch comes from another agent.
            patch = sample.metadata.get("patch", "")
            grade = await episode.grade_patch(task, patch, parts, Clock("", ignore))
        except SwerlError as error:
            grade = Grade(Verdict.INFRA, f"{type(error).__name__}: {error}")
    if grade.verdict in LEARNABLE:
        # The other agent's tokens are unknown here.
        return parts.reward(Attempt(task, grade, Status.COMPLETED, patch, Trajectory("")))
    return float(convert.lost(sample, grade.verdict, grade.reason).reward)


class _Service:
    """One gateway, engine client and sandbox backend for all rollouts of one event loop.

    A task of its own opens and closes them, because slime may cancel any call, also the first.
    """

    def __init__(self, args: SlimeArgs) -> None:
        """Read the settings. Raises InputError."""
        self._recipe = convert.recipe_of(args)
        self.family = wiring.family_of(self._recipe, self._recipe.model.path)
        folder = getattr(args, "swerl_episodes", None)
        self._episodes = Path(folder) if folder else None
        self._logs = Path(mkdtemp(prefix="swerl-slime-"))
        self._numbers = count()
        self._ending = asyncio.Event()
        # Callers wait for this future, because the owner's task opens the parts.
        self._opened: asyncio.Future[Parts] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._hold_open())

    async def parts(self) -> Parts:
        """Return the shared parts once they are open. Raises SwerlError if opening failed."""
        # A cancelled caller must not cancel an opening that others wait for.
        return await asyncio.shield(self._opened)

    async def attempt(
        self, task: Task, sample: SlimeSample, sampling_params: Mapping[str, Any]
    ) -> Episode:
        """Run an Episode, with the recipe's refills if infrastructure loses it."""
        recipe = convert.with_sampling(self._recipe, sampling_params)
        parts = replace(await self.parts(), rollout=recipe.rollout)
        # The counter gives a sample that runs twice two names.
        name = f"slime/{task.id.replace('/', '_')}.{sample.index}-{next(self._numbers)}"
        async with parts.sandboxes.slot:
            result = await group.run_with_refills(task, name, parts)
        if self._episodes:
            record.write(self._episodes / Path(name).name, result)
        return result

    async def close(self) -> None:
        """Close everything; a second call does nothing."""
        self._ending.set()
        with suppress(Exception):  # Callers of `parts` have received it.
            await self._owner

    async def _hold_open(self) -> None:
        recipe = self._recipe
        setup = EngineSetup(family=self.family, log_dir=self._logs, model=recipe.model.path)
        try:
            async with AsyncExitStack() as stack:
                # A killed process may have left sandboxes behind.
                await wiring.reap_leftovers(recipe, _log_notice)
                engine = await stack.enter_async_context(wiring.engine_of(recipe, setup))
                gateway: Gateway = await stack.enter_async_context(
                    wiring.gateway_of(recipe, engine, setup, _log_notice)
                )
                self._opened.set_result(wiring.parts_of(recipe, gateway, _log_notice))
                await self._ending.wait()
        except BaseException as error:
            # Callers that wait for the parts receive the reason.
            if not self._opened.done():
                self._opened.set_exception(error)
            raise


_SERVICES: WeakKeyDictionary[asyncio.AbstractEventLoop, _Service] = WeakKeyDictionary()
"""Open services: slime calls plain functions, so the shared parts are stored by event loop."""


def _running_service(args: SlimeArgs) -> _Service:
    """Return the service of the running loop; the first call opens it. Raises InputError."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVICES:
        if not _SERVICES:
            atexit.register(_close_all)
        _SERVICES[loop] = _Service(args)
    return _SERVICES[loop]


def _close_all() -> None:
    """At exit, close the services of loops that still run in other threads."""
    services: Sequence[tuple[asyncio.AbstractEventLoop, _Service]] = list(_SERVICES.items())
    for loop, service in services:
        # A stopped loop cannot run `close`.
        if loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(service.close(), loop)
            with suppress(TimeoutError):
                closing.result(_CLOSE_S)


def _log_notice(event: Event) -> None:
    if isinstance(event, Notice):
        _LOG.warning("%s", event.text)
