"""A backend whose every sandbox is in the ledger before it exists."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from types import TracebackType

from pydantic import BaseModel

from swerl.core import plugins
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import ImageError, InputError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount, new_name
from swerl.sandboxes.ledger.entry import Entry
from swerl.sandboxes.ledger.provider import explain, open_settings
from swerl.sandboxes.ledger.records import Records
from swerl.sandboxes.ledger.store import default_ledger

_REMOVE_TIMEOUT_S = 15.0


def tracked(
    backend: str,
    options: BaseModel | None,
    *,
    run: str,
    warn: Callable[[str], None] = lambda _: None,
) -> SandboxBackend:
    """Build the backend of this name and settings, with its sandboxes in the user's ledger.

    `run` says what they are used for. `warn` hears once where a free backend's records cannot be
    written; a paid one creates nothing then.
    """
    built = plugins.load("sandboxes", backend).build(*([] if options is None else [options]))
    ledger = default_ledger()
    ledger.tidy()
    return Tracked(built, Records(ledger, backend, open_settings(options), run=run, warn=warn))


class Tracked:
    """Wraps a SandboxBackend, and is one."""

    def __init__(self, inner: SandboxBackend, records: Records) -> None:
        self.inner = inner
        self.records = records
        self.has_opened = False
        """Whether the provider ever made a sandbox for this object."""

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox of `image`, after writing down that it is about to be."""
        name = name or new_name()
        price = self.inner.price(limits)
        return _Tracking(
            self,
            Entry(name, image, 0.0, limits.lifetime_s, price),
            lambda: self.inner.open(image, limits, workdir=workdir, mounts=mounts, name=name),
        )

    async def live(self) -> Sequence[LiveSandbox]:
        """Return the sandboxes of swerl's that the provider says exist, whoever opened them."""
        return await self.inner.live()

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name and all that is left of it; nothing where none is."""
        await self.inner.remove(name)
        self.records.ended(name, why="removed")

    def price(self, limits: Limits) -> float:
        """Return what such a sandbox costs, in US dollars an hour."""
        return self.inner.price(limits)


class _Tracking:
    """One sandbox from its intent to its end."""

    def __init__(
        self,
        tracked: Tracked,
        entry: Entry,
        begin: Callable[[], AbstractAsyncContextManager[Sandbox]],
    ) -> None:
        self._tracked = tracked
        self._records = tracked.records
        self._entry = entry
        self._begin = begin

    async def __aenter__(self) -> Sandbox:
        name = self._entry.name
        self._records.intend(replace(self._entry, intended_s=time.time()))
        try:
            self._context = self._begin()
            sandbox = await self._context.__aenter__()
        except BaseException as error:
            if self._made_nothing(error):
                self._records.ended(name, why=f"not created: {explain(error)}")
            else:
                # An answer that got lost may still become a sandbox: reap looks for a paid one.
                why = f"not created: {explain(error)}"
                await self._clear(why, is_sure=not self._entry.price)
            raise
        self._tracked.has_opened = True
        self._records.opened(name, id=sandbox.id)
        return sandbox

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        name = self._entry.name
        try:
            swallowed = await self._context.__aexit__(kind, error, trace)
        except BaseException as other:
            if other is error:
                self._records.ended(name, why=_why(error))
            else:
                await self._clear(f"not seen to close: {explain(other)}", is_sure=True)
            raise
        self._records.ended(name, why=_why(error))
        return swallowed

    def _made_nothing(self, error: BaseException) -> bool:
        """Say whether a failed create cannot have made anything.

        A provider that was never reached has no sandbox of ours; one that goes away may have.
        """
        unreached = isinstance(error, SandboxUnavailableError) and not self._tracked.has_opened
        return unreached or isinstance(error, InputError | ImageError)

    async def _clear(self, why: str, *, is_sure: bool) -> None:
        """Remove what may exist after a create or a close that failed midway.

        `is_sure` says whether nothing can exist after that; else the ledger keeps its doubt.
        """
        name = self._entry.name
        try:
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await self._tracked.inner.remove(name)
        except Exception as error:  # noqa: BLE001  the first error is the one to tell
            self._records.doubted(name, why=f"{why}; then not removed: {explain(error)}")
            return
        note = self._records.ended if is_sure else self._records.doubted
        note(name, why=why)


def _why(error: BaseException | None) -> str:
    return f"closed after {type(error).__name__}" if error else "closed"
