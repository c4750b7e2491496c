"""Creating sandboxes: paced, retried with jitter under one limit, and never left unaccounted.

A create whose answer was lost may have succeeded. So before another attempt, and at the end, the
sandboxes of that name are looked up by their metadata and removed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from swerl.core.errors import ImageError, SandboxError
from swerl.sandboxes._e2b.errors import CutError
from swerl.sandboxes._e2b.sdk import Machine, Provider

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 16.0
_LAST_WAIT_S = 5.0
"""Seconds that a create under way is given when its caller gives up."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sandbox to create."""

    template: str
    metadata: Mapping[str, str]
    marks: Mapping[str, str]
    """The part of the metadata that no other sandbox has."""
    lifetime_s: float
    reach: Sequence[str]
    """Outside hosts that it may reach."""


class Creator:
    """Creates sandboxes no faster than the provider allows."""

    def __init__(self, provider: Provider, *, concurrency: int, per_s: float) -> None:
        self._provider = provider
        self._slots = asyncio.Semaphore(concurrency)
        self._interval_s = 1 / per_s
        self._next_at = 0.0

    @asynccontextmanager
    async def created(self, wanted: Wanted, timeout_s: float) -> AsyncIterator[Machine]:
        """Create a sandbox; leaving the context removes what an answer lost on the way left over.

        The sandbox itself is for the caller to end. Raises SandboxError when `timeout_s` is over.
        """
        attempts = _Attempts()
        try:
            yield await self._create(wanted, timeout_s, attempts)
        finally:
            if attempts.uncertain:
                with suppress(SandboxError):  # `swerl sandbox reap` looks again
                    await asyncio.shield(self.remove(wanted.marks))

    async def remove(self, marks: Mapping[str, str]) -> None:
        """Kill every sandbox with these marks."""
        for found in await self._provider.find(marks):
            await self._provider.kill(found.id)

    async def _create(self, wanted: Wanted, timeout_s: float, attempts: _Attempts) -> Machine:
        try:
            async with asyncio.timeout(timeout_s) as timer:
                while True:
                    try:
                        async with self._slots:
                            await self._pace()
                            return await self._attempt(wanted, attempts)
                    except SandboxError as error:
                        if not error.retryable:
                            raise
                        attempts.last = error
                    await self._clean_up(wanted, attempts)
                    await asyncio.sleep(attempts.pause_s())
        except TimeoutError as error:
            if not timer.expired():
                raise
            why = f": {attempts.last}" if attempts.last else ""
            message = f"no sandbox of {wanted.template!r} within {timeout_s:g} s{why}"
            hint = (attempts.last and attempts.last.hint) or "raise boot_timeout_s"
            raise SandboxError(message, hint=hint, retryable=True) from error

    async def _attempt(self, wanted: Wanted, attempts: _Attempts) -> Machine:
        attempts.count += 1
        attempts.uncertain = True  # until an answer says whether there is a sandbox
        making = asyncio.ensure_future(
            self._provider.create(
                wanted.template,
                lifetime_s=wanted.lifetime_s,
                metadata=wanted.metadata,
                reach=wanted.reach,
            )
        )
        try:
            machine = await asyncio.shield(making)
        except asyncio.CancelledError:
            attempts.last = await asyncio.shield(_outlast(making)) or attempts.last
            raise
        except CutError:
            raise
        except (SandboxError, ImageError):
            attempts.uncertain = attempts.left_over
            raise
        attempts.uncertain = attempts.left_over
        return machine

    async def _clean_up(self, wanted: Wanted, attempts: _Attempts) -> None:
        """Remove what an attempt without an answer made; it may still be on its way."""
        if attempts.uncertain:
            attempts.left_over = True
            with suppress(SandboxError):
                await self.remove(wanted.marks)

    async def _pace(self) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(now, self._next_at)
        self._next_at = begin + self._interval_s
        await asyncio.sleep(begin - now)


@dataclass(slots=True)
class _Attempts:
    """What was tried to create one sandbox."""

    count: int = 0
    uncertain: bool = False
    """Whether a sandbox may exist that no answer told of."""
    left_over: bool = False
    """Whether an earlier attempt may have left one."""
    last: SandboxError | None = None

    def pause_s(self) -> float:
        """Return how long to wait: anything up to a bound that doubles."""
        bound = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.count)
        return random.uniform(0, bound)


async def _outlast(making: asyncio.Future[Machine]) -> SandboxError | None:
    """Wait for the answer to a create that nobody wants any more, so that it can be removed.

    Returns what went wrong, where anything did.
    """
    await asyncio.wait({making}, timeout=_LAST_WAIT_S)
    making.cancel()
    (end,) = await asyncio.gather(making, return_exceptions=True)
    return end if isinstance(end, SandboxError) else None
