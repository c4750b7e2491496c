"""A backend that records every sandbox in the ledger before it creates the sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, TypeVar

from pydantic import BaseModel, SecretBytes, SecretStr

from swerl.core import plugins
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import ImageError, InputError, SandboxError, SandboxUnavailableError
from swerl.core.liveness import this_process
from swerl.core.sandbox import Limits, Mount, new_name
from swerl.images.ondemand import WrappedBackend
from swerl.sandboxes.ledger.store import FAILURES, Entry, Ledger, Use, default_ledger

T = TypeVar("T")
_REMOVE_TIMEOUT_S = 15.0
_TIDY_EVERY = 250
"""Sandboxes that a process records between two calls of `Ledger.tidy`."""
_SECRET = re.compile(
    r"(^|[_-])(secret|token|password|passwd|passphrase|credentials?|authorization|cookie|"
    r"api[_-]?key|access[_-]?key|private[_-]?key)s?$",
    re.IGNORECASE,
)
_LOGIN_IN_URL = re.compile(r"(\w://)[^/@\s]+@")


def tracked(
    backend: str,
    options: BaseModel | None,
    *,
    run: str,
    warn: Callable[[str], None] = lambda _: None,
) -> SandboxBackend:
    """Build the named backend; its sandboxes are recorded in the user's ledger.

    `run` names their purpose. `warn` gets the ledger's notices, and one text if the records of a
    free backend cannot be written. A paid backend creates nothing in that case.
    """
    built = plugins.load("sandboxes", backend).build(*([] if options is None else [options]))
    ledger = default_ledger()
    ledger.tidy()
    for notice in ledger.notices():
        warn(notice)
    return Tracked(built, Recorder(ledger, backend, without_secrets(options), run=run, warn=warn))


def without_secrets(options: BaseModel | None) -> str:
    """Return a backend's settings as JSON, without defaults and without secrets."""
    known = {} if options is None else _public(options.model_dump(exclude_defaults=True))
    return json.dumps(known, sort_keys=True)


def explain(error: BaseException) -> str:
    """Return an error and its hint in one line."""
    text = str(error).strip() or type(error).__name__
    hint = getattr(error, "hint", "")
    return " ".join(f"{text} ({hint})".split()) if hint else " ".join(text.split())


class Tracked(WrappedBackend):
    """A SandboxBackend around another one."""

    def __init__(self, inner: SandboxBackend, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder
        self._has_opened = False
        """True once the provider has made a sandbox for this object."""

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[Sandbox]:
        name = name or new_name()
        entry = await self._recorder.intend(
            name, image, lifetime_s=limits.lifetime_s, price=self.inner.price(limits)
        )
        try:
            context = self.inner.open(image, limits, workdir=workdir, mounts=mounts, name=name)
            # Entered by hand, because failures to create and to close need different records.
            sandbox = await context.__aenter__()
        except BaseException as error:
            await self._not_created(entry, error)
            raise
        self._has_opened = True
        try:
            await self._recorder.opened(entry, id=sandbox.id)
            yield sandbox
        except BaseException as error:
            if not await self._close(entry, context, error):
                raise
        else:
            await self._close(entry, context, None)

    async def remove(self, name: str) -> None:
        await super().remove(name)
        await self._recorder.ended(name, why="removed")

    async def _not_created(self, entry: Entry, error: BaseException) -> None:
        # A provider that was never reached has no sandbox of ours. One that was reached may have.
        is_unreached = isinstance(error, SandboxUnavailableError) and not self._has_opened
        why = f"not created: {explain(error)}"
        if is_unreached or isinstance(error, InputError | ImageError):
            await self._recorder.ended(entry.name, why=why)
        else:
            # An answer that got lost may still become a sandbox: `reap` looks for a paid one.
            await self._clear(entry, why, is_sure=not entry.price)

    async def _close(
        self,
        entry: Entry,
        context: AbstractAsyncContextManager[Sandbox],
        error: BaseException | None,
    ) -> bool:
        """Close the sandbox and record its end; return True if the backend swallowed the error."""
        why = f"closed after {type(error).__name__}" if error else "closed"
        try:
            trace = error.__traceback__ if error else None
            swallowed = await context.__aexit__(type(error) if error else None, error, trace)
        except BaseException as other:
            # The backend has raised the block's own error again: it closed the sandbox.
            if other is error:
                await self._recorder.ended(entry.name, why=why)
            else:
                await self._clear(entry, f"not seen to close: {explain(other)}", is_sure=True)
            raise
        await self._recorder.ended(entry.name, why=why)
        return bool(swallowed)

    async def _clear(self, entry: Entry, why: str, *, is_sure: bool) -> None:
        """Remove what a failed create or close may have left.

        `is_sure`: nothing can exist after a removal that succeeds. Else the doubt stays recorded.
        """
        try:
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await self.inner.remove(entry.name)
        except Exception as error:  # noqa: BLE001  the caller raises the first error
            why = f"{why}; then not removed: {explain(error)}"
            await self._recorder.doubted(entry, why=why)
            return
        if is_sure:
            await self._recorder.ended(entry.name, why=why)
        else:
            await self._recorder.doubted(entry, why=why)


class Recorder:
    """Records one process's sandboxes of one backend and run.

    A commit may wait for the disk or for another process, so a thread makes it. A fork is another
    owner, and SQLite's connections do not survive a fork: the recorder closes before one, and each
    side opens its own afterwards.
    """

    def __init__(
        self,
        ledger: Ledger,
        backend: str,
        settings: str,
        *,
        run: str,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ledger = ledger
        self._use = Use(backend, settings, run, this_process())
        self._warn = warn
        self._has_warned = False
        self._num_recorded = 0
        self._thread: ThreadPoolExecutor | None = None
        self._db: sqlite3.Connection | None = None
        self._file = 0
        """Inode of the open database."""
        # A fork hook cannot be removed, so it must not keep the recorder alive.
        close = weakref.WeakMethod(self.close)
        os.register_at_fork(before=lambda: (found := close()) and found())

    async def intend(self, name: str, image: str, *, lifetime_s: float, price: float) -> Entry:
        """Record that a sandbox is about to be created.

        Raises SandboxError if that fails and the sandbox costs money.
        """
        use = self._use
        # This process is a fork of the one that made the recorder.
        if use.owner.pid != os.getpid():
            use = self._use = Use(use.backend, use.settings, use.run, this_process())
        entry = Entry(use, name, image, time.time(), lifetime_s, price)
        adding = self._submit(lambda db: self._ledger.add(db, entry))
        try:
            # The write continues even if the caller is cancelled.
            return await asyncio.shield(asyncio.wrap_future(adding))
        except asyncio.CancelledError:
            # The thread may have committed the intent: its end comes after it in the same queue.
            self._end(name, "not created: cancelled")
            raise
        except FAILURES as error:
            place = f"the ledger in {self._ledger.folder}: {error}"
            if price:
                raise SandboxError(
                    f"no paid sandbox without a record of it, and nothing can write {place}",
                    hint="free some space there, or name another folder in SWERL_STATE",
                ) from error
            if not self._has_warned:
                self._warn(f"cannot write {place}; `swerl sandbox reap` will not find these")
            self._has_warned = True
            return entry

    async def opened(self, entry: Entry, *, id: str) -> None:
        """Record that a sandbox exists."""
        now_s = time.time()
        await _finished(
            self._submit(lambda db: self._ledger.set_opened(db, entry, id=id, at_s=now_s))
        )

    async def ended(self, name: str, *, why: str) -> None:
        """Record that a sandbox is gone."""
        await _finished(self._end(name, why))

    async def doubted(self, entry: Entry, *, why: str) -> None:
        """Record that a sandbox should be gone, but that its removal was not confirmed."""
        await _finished(self._submit(lambda db: self._ledger.set_doubt(db, entry, why=why)))

    def close(self) -> None:
        """Finish all writes and close the database; the next write opens it again."""
        if self._thread:
            self._thread.shutdown()
        self._thread = None
        self._disconnect()

    def _end(self, name: str, why: str) -> Future[None]:
        now_s = time.time()
        return self._submit(lambda db: self._ledger.set_ended(db, name, why=why, at_s=now_s))

    def _submit(self, write: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Have the one thread make a write, after all earlier ones."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "swerl-ledger")
        return self._thread.submit(self._commit, write)

    def _commit(self, write: Callable[[sqlite3.Connection], T]) -> T:
        try:
            done = write(self._connect())
        except FAILURES:
            # After an error the next write opens the database again.
            self._disconnect()
            raise
        if isinstance(done, Entry):
            self._num_recorded += 1
            if self._num_recorded % _TIDY_EVERY == 0:
                self._ledger.tidy()
        return done

    def _connect(self) -> sqlite3.Connection:
        # Somebody may have deleted the folder: rows in the deleted file would be lost.
        with suppress(FileNotFoundError):
            if self._db and self._ledger.path.stat().st_ino == self._file:
                return self._db
        self._disconnect()
        self._db = self._ledger.open()
        self._file = self._ledger.path.stat().st_ino
        return self._db

    def _disconnect(self) -> None:
        if self._db:
            self._db.close()
        self._db = None


async def _finished(write: Future[None]) -> None:
    """Wait for a write that follows an intent, and ignore its failure.

    Without the record `reap` looks for a sandbox that is gone, which does no harm.
    """
    with suppress(*FAILURES):
        await asyncio.shield(asyncio.wrap_future(write))


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _public(each)
            for key, each in value.items()
            if not _SECRET.search(str(key)) and not isinstance(each, SecretStr | SecretBytes)
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_public(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _LOGIN_IN_URL.sub(r"\1", str(value))
