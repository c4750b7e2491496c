"""Record every sandbox before it is created, and remove those whose owner is gone.

One SQLite table, `sandboxes.sqlite3` in the state folder, has a row for each sandbox: the intent
before it is created, then the provider's id, and its end. A row survives `kill -9` of its process.
SQLite does not wait for the disk, so a power cut may damage the file.

`reap` removes a sandbox if its owner is dead, its deadline passed, or its removal was not
confirmed. Within its lifetime it keeps the sandbox of a living owner, and of an owner on another
host, whose state cannot be found out.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from swerl.core import plugins
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import (
    ImageError,
    InputError,
    RunError,
    SandboxError,
    SandboxUnavailableError,
    SwerlError,
)
from swerl.core.jobs import run_jobs
from swerl.core.liveness import Life, ProcessIdentity, life, this_process
from swerl.core.sandbox import Limits, LiveSandbox, Mount, new_name
from swerl.core.secrets import state_dir
from swerl.images.ondemand import WrappedBackend
from swerl.images.store import default_store
from swerl.recipe.check import plugin_options
from swerl.recipe.sections import PluginSection

FAILURES = (OSError, sqlite3.Error)
"""Errors of a ledger that cannot be written."""
GRACE_S = 60.0
"""Time past its deadline in which an owner or provider may still be closing a sandbox."""
_CREATE_S = 300.0
"""A provider may still create a sandbox for so long after its owner's death."""
_AT_ONCE = 8
_ANSWER_TIMEOUT_S = 20.0
_REMOVE_TIMEOUT_S = 60.0
_BUSY_TIMEOUT_S = 20.0
_KEPT_DAYS, _KEPT_FREE_DAYS = 90, 1
"""Days for which ended sandboxes keep their rows: those with a price, and those without."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (
    name TEXT PRIMARY KEY, backend TEXT, settings TEXT, run TEXT, owner TEXT, image TEXT,
    price REAL, lifetime_s REAL, intended_s REAL, id TEXT, opened_s REAL, ended_s REAL, why TEXT
) WITHOUT ROWID
"""
_DOLLARS = """
SELECT TOTAL(price / 3600 * MAX(0,
    CASE WHEN ended_s THEN ended_s ELSE MIN(?, opened_s + lifetime_s) END - opened_s
)) AS dollars FROM sandboxes WHERE opened_s AND run = ?
"""
_SECRET = re.compile(
    r"(^|[_-])(secret|token|password|passwd|passphrase|credentials?|authorization|cookie|"
    r"api[_-]?key|access[_-]?key|private[_-]?key)s?$",
    re.IGNORECASE,
)
_LOGIN_IN_URL = re.compile(r'(\w://)[^/@\s"]+@')


@dataclass(frozen=True, slots=True)
class Entry:
    """One sandbox, from the intent to its end. Times are Unix seconds, 0 for not yet."""

    name: str
    backend: str
    settings: str
    """The backend's settings without secrets, enough to reach the provider again: a JSON object
    with sorted keys."""
    run: str
    owner: ProcessIdentity
    image: str
    price: float
    """US dollars an hour."""
    lifetime_s: float
    intended_s: float
    id: str = ""
    """The provider's id."""
    opened_s: float = 0.0
    ended_s: float = 0.0
    why: str = ""
    """The reason for its end; without an end, why its removal was not confirmed."""

    @property
    def provider(self) -> Provider:
        return Provider(self.backend, self.settings)

    @property
    def deadline_s(self) -> float:
        """Time at which its lifetime is over."""
        return (self.opened_s or self.intended_s) + self.lifetime_s

    def cost(self, now_s: float) -> float:
        """Return its cost until its end, or until `now_s`, in US dollars."""
        end_s = self.ended_s or now_s
        return max(end_s - self.opened_s, 0.0) / 3600 * self.price if self.opened_s else 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """The database in one folder."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "sandboxes.sqlite3"

    def read(self, *, run: str | None = None) -> list[Entry]:
        """Return all entries, or those of one run. Raises RunError."""
        rows = self._query("SELECT * FROM sandboxes WHERE run = ? OR ? IS NULL", (run, run))
        owner_of = cache(lambda text: ProcessIdentity(**json.loads(text)))
        entries = [Entry(**{**row, "owner": owner_of(row["owner"])}) for row in rows]
        return sorted(entries, key=lambda entry: entry.intended_s)

    def dollars(self, run: str) -> float:
        """Return the cost of a run's sandboxes so far; of a lost one until its deadline."""
        rows = self._query(_DOLLARS, (time.time(), run))
        return float(rows[0]["dollars"]) if rows else 0.0

    def add(self, entry: Entry) -> None:
        """Insert an entry. This and the other writes raise OSError and sqlite3.Error."""
        row = {**asdict(entry), "owner": json.dumps(asdict(entry.owner))}
        self._write(
            f"INSERT OR REPLACE INTO sandboxes VALUES ({', '.join('?' * len(row))})",
            [*row.values()],
        )

    def set_opened(self, name: str, *, id: str) -> None:
        values = (id, time.time(), name)
        self._write("UPDATE sandboxes SET id = ?, opened_s = ? WHERE name = ?", values)

    def set_doubt(self, name: str, *, why: str) -> None:
        """Record that the sandbox should be gone, but that its removal was not confirmed."""
        self._write("UPDATE sandboxes SET why = ? WHERE name = ? AND NOT ended_s", (why, name))

    def set_ended(self, name: str, *, why: str, at_s: float = 0.0) -> None:
        """Record the end of a sandbox; the first recorded end counts."""
        change = "UPDATE sandboxes SET why = ?, ended_s = ? WHERE name = ? AND NOT ended_s"
        self._write(change, (why, at_s or time.time(), name))

    def tidy(self) -> None:
        """Delete the rows of sandboxes that ended long ago, if the database can be written."""
        if self.path.exists():
            now_s = time.time()
            days = "CASE WHEN price THEN ? ELSE ? END"
            old = f"DELETE FROM sandboxes WHERE ended_s AND ended_s < ? - 86400 * {days}"
            with suppress(*FAILURES):
                self._write(old, (now_s, _KEPT_DAYS, _KEPT_FREE_DAYS))

    def _query(self, query: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        # After a `kill -9` the reader finishes the write, if it may.
        mode = "rw" if os.access(self.path, os.W_OK) else "ro"
        try:
            with self._connect(mode) as db:
                db.row_factory = sqlite3.Row
                return [dict(row) for row in db.execute(query, values)]
        except FAILURES as error:
            if "no such table" in str(error):  # its first writer is about to add it
                return []
            hint = "move it away to start a new one; check each provider for sandboxes left over"
            raise RunError(f"cannot read {self.path}: {error}", hint=hint) from error

    def _write(self, change: str, values: Sequence[Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._connect("rwc") as db:
            # Locks of a rollback journal also work on network file systems, unlike a WAL.
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute("PRAGMA synchronous = OFF")
            db.execute(_SCHEMA)
            db.execute(change, values)

    @contextmanager
    def _connect(self, mode: str) -> Iterator[sqlite3.Connection]:
        """Open the database; the connection commits each statement by itself."""
        url = f"{self.path.absolute().as_uri()}?mode={mode}"
        db = sqlite3.connect(url, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
        try:
            yield db
        finally:
            db.close()


def default_ledger() -> Ledger:
    """Return the user's ledger."""
    return Ledger(state_dir() / "ledger")


def tracked(
    backend: str,
    options: BaseModel | None,
    *,
    run: str,
    warn: Callable[[str], None] = lambda _: None,
) -> SandboxBackend:
    """Build the named backend; its sandboxes are recorded in the user's ledger.

    `run` names their purpose. `warn` gets one text if the records of a free backend cannot be
    written. A paid backend creates nothing in that case.
    """
    built = plugins.load("sandboxes", backend).build(*([] if options is None else [options]))
    ledger = default_ledger()
    ledger.tidy()
    return Tracked(built, ledger, Provider(backend, without_secrets(options)), run=run, warn=warn)


def without_secrets(options: BaseModel | None) -> str:
    """Return a backend's settings as JSON, without defaults and without secrets."""

    def public(settings: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if not _SECRET.search(key)}

    text = options.model_dump_json(exclude_defaults=True) if options else "{}"
    text = json.dumps(json.loads(text, object_hook=public), sort_keys=True)
    return _LOGIN_IN_URL.sub(r"\1", text)


def explain(error: BaseException) -> str:
    """Return an error and its hint in one line."""
    text = error.explained() if isinstance(error, SwerlError) else str(error)
    return " ".join(text.split()) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Provider:
    """A backend and its settings."""

    backend: str
    settings: str = "{}"
    """A JSON object with sorted keys, so that equal settings compare equal."""

    def build(self) -> SandboxBackend:
        """Build the backend. Raises SwerlError if it is not installed or rejects its settings."""
        section = PluginSection.model_validate({**json.loads(self.settings), "type": self.backend})
        options = plugin_options("sandboxes", section, section="sandbox")
        module = plugins.load("sandboxes", self.backend)
        built: SandboxBackend = module.build(*([] if options is None else [options]))
        return built


class Tracked(WrappedBackend):
    """A SandboxBackend around another one, whose sandboxes it records."""

    def __init__(
        self,
        inner: SandboxBackend,
        ledger: Ledger,
        provider: Provider,
        *,
        run: str,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(inner)
        self._ledger = ledger
        self._provider = provider
        self._run = run
        self._warn = warn
        self._has_warned = False
        self._has_opened = False
        """True once the provider has made a sandbox for this object."""
        # One thread keeps the order of the writes, and the event loop waits for no disk.
        self._thread = ThreadPoolExecutor(1, "swerl-ledger")

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
        await self._intend(name, image, limits)
        is_open, cause = False, None
        try:
            inside = self.inner.open(image, limits, workdir=workdir, mounts=mounts, name=name)
            async with inside as sandbox:
                is_open = self._has_opened = True
                await self._record(self._ledger.set_opened, name, id=sandbox.id)
                try:
                    yield sandbox
                except BaseException as error:
                    cause = error
                    raise
        except BaseException as error:
            if error is cause:  # the block's own error: the backend closed the sandbox
                why = f"closed after {type(error).__name__}"
                await self._record(self._ledger.set_ended, name, why=why)
            else:
                what = "not seen to close" if is_open else "not created"
                await self._clear(name, error, f"{what}: {explain(error)}")
            raise
        await self._record(self._ledger.set_ended, name, why="closed")

    async def remove(self, name: str) -> None:
        await super().remove(name)
        await self._record(self._ledger.set_ended, name, why="removed")

    async def _intend(self, name: str, image: str, limits: Limits) -> None:
        """Record that a sandbox is about to be created.

        Raises SandboxError if that fails and the sandbox costs money.
        """
        price, provider = self.inner.price(limits), self._provider
        entry = Entry(
            name=name,
            backend=provider.backend,
            settings=provider.settings,
            run=self._run,
            owner=this_process(),
            image=image,
            price=price,
            lifetime_s=limits.lifetime_s,
            intended_s=time.time(),
        )
        loop = asyncio.get_running_loop()
        adding = loop.run_in_executor(self._thread, self._ledger.add, entry)
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            await self._record(self._ledger.set_ended, name, why="not created: cancelled")
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

    async def _clear(self, name: str, cause: BaseException, why: str) -> None:
        """Remove what a failed create or close may have left; if that fails, leave it to `reap`."""
        # A provider that was never reached has no sandbox of ours. One that was reached may have.
        is_unreached = isinstance(cause, SandboxUnavailableError) and not self._has_opened
        try:
            if not (is_unreached or isinstance(cause, InputError | ImageError)):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await self.inner.remove(name)
        except Exception as error:  # noqa: BLE001  the caller raises the first error
            why = f"{why}; then not removed: {explain(error)}"
            await self._record(self._ledger.set_doubt, name, why=why)
        else:
            await self._record(self._ledger.set_ended, name, why=why)

    async def _record(self, write: Callable[..., None], name: str, **values: str) -> None:
        """Make a write that follows an intent, and ignore its failure.

        Without the record `reap` looks for a sandbox that is gone, which does no harm.
        """
        loop = asyncio.get_running_loop()
        with suppress(*FAILURES):
            writing = loop.run_in_executor(self._thread, lambda: write(name, **values))
            await asyncio.shield(writing)


class SandboxState(StrEnum):
    """The state of a sandbox, by its ledger and its provider."""

    INTENDED = "intended"
    """Its owner is about to create it."""
    OPEN = "open"
    """It is in use."""
    LOST = "lost"
    """It is in use by its record, but its provider does not list it."""
    ORPHAN = "orphan"
    """`reap` removes it."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ListedSandbox:
    """One sandbox of the ledger, and its provider's word on it."""

    entry: Entry
    state: SandboxState
    owner: Life
    is_live: bool
    """True if its provider lists it."""
    reason: str
    """Why `reap` removes it; empty if it stays."""
    backend: SandboxBackend | None
    problem: str
    """Why its provider was not reached, and a remedy."""


async def list_sandboxes(ledger: Ledger, *, run: str | None = None) -> list[ListedSandbox]:
    """Read the ledger, of one run or of all, and ask the providers.

    Raises RunError if the ledger cannot be read.
    """
    entries = await asyncio.to_thread(ledger.read, run=run)
    providers = list({entry.provider for entry in entries if not entry.ended_s})
    asked_s = time.time()
    answers = dict(zip(providers, await asyncio.gather(*map(_ask, providers)), strict=True))
    life_of = cache(life)
    return [
        _judge(entry, life_of(entry.owner), answers.get(entry.provider, _Answer()), asked_s)
        for entry in await asyncio.to_thread(ledger.read, run=run)
    ]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The sandboxes that a provider lists, by name; None if it was not reached."""

    backend: SandboxBackend | None = None
    live: Mapping[str, LiveSandbox] | None = None
    problem: str = ""


async def _ask(provider: Provider) -> _Answer:
    try:
        backend = provider.build()
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return _Answer(backend, {sandbox.name: sandbox for sandbox in await backend.live()})
    except TimeoutError:
        return _Answer(problem=f"no answer within {_ANSWER_TIMEOUT_S:g} s")
    except Exception as error:  # noqa: BLE001  a third party's plug-in may raise anything
        return _Answer(problem=explain(error))


def _judge(entry: Entry, owner: Life, answer: _Answer, asked_s: float) -> ListedSandbox:
    is_live = answer.live is not None and entry.name in answer.live
    reason, state = "", SandboxState.OPEN if entry.opened_s else SandboxState.INTENDED
    if entry.ended_s:
        state = SandboxState.ENDED
    elif owner is Life.DEAD:
        reason = "its owner is dead"
    elif entry.why:
        reason = "it was not seen to close"
    elif time.time() > entry.deadline_s + GRACE_S:
        reason = "its deadline passed"
    elif answer.live is not None and 0 < entry.opened_s < asked_s and not is_live:
        state = SandboxState.LOST
    state = SandboxState.ORPHAN if reason else state
    return ListedSandbox(entry, state, owner, is_live, reason, answer.backend, answer.problem)


class Outcome(StrEnum):
    """The result of reaping one sandbox."""

    REMOVED = "removed"
    FAILED = "failed"
    WOULD = "would remove"
    """Nothing was done: a dry run."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """The result of one removal."""

    entry: Entry
    outcome: Outcome
    reason: str
    """Why it is removed, or could not be."""


async def reap(
    ledger: Ledger,
    *,
    run: str | None = None,
    living: bool = False,
    dry_run: bool = False,
    on_done: Callable[[Reaped], None] = lambda _: None,
) -> list[Reaped]:
    """Remove the sandboxes that nobody owns; a failure concerns one sandbox.

    `run` excludes other runs. `living` also removes sandboxes in use. `on_done` gets each result.
    Raises RunError if the ledger cannot be read.
    """

    async def remove(sandbox: ListedSandbox) -> Reaped:
        return await _remove(ledger, sandbox, dry_run=dry_run)

    sandboxes = await list_sandboxes(ledger, run=run)
    due = [
        replace(sandbox, reason=sandbox.reason or "every sandbox goes")
        for sandbox in sandboxes
        if sandbox.reason or (living and sandbox.state is not SandboxState.ENDED)
    ]
    reaped = await run_jobs(due, remove, limit=_AT_ONCE, on_done=on_done)
    if not dry_run:
        with suppress(OSError):  # nobody left a part of a snapshot in a store without access
            await asyncio.to_thread(default_store().remove_leftovers)
    return reaped


async def reap_leftovers(ledger: Ledger, run: str) -> list[Reaped]:
    """Remove the sandboxes that earlier starts of a run left; ask no provider if there are none."""
    entries = await asyncio.to_thread(ledger.read, run=run)
    owners = {entry.owner for entry in entries if not entry.ended_s}
    return await reap(ledger, run=run) if Life.DEAD in map(life, owners) else []


async def _remove(ledger: Ledger, sandbox: ListedSandbox, *, dry_run: bool) -> Reaped:
    entry, reason = sandbox.entry, sandbox.reason
    if sandbox.backend is None:
        problem = sandbox.problem or "it appeared just now; run the command again"
        return Reaped(entry, Outcome.FAILED, problem)
    if dry_run:
        return Reaped(entry, Outcome.WOULD, reason)
    try:
        async with asyncio.timeout(_REMOVE_TIMEOUT_S):
            await sandbox.backend.remove(entry.name)
    except Exception as error:  # noqa: BLE001  a third party's plug-in may raise anything
        return Reaped(entry, Outcome.FAILED, explain(error))
    # A sandbox that was gone before cost money until its deadline at most.
    now_s = time.time()
    ended_s = now_s if sandbox.is_live else min(now_s, entry.deadline_s)
    # A paid one that was being created may still appear: the next reap looks for it again.
    may_appear = entry.price and not entry.opened_s and now_s < entry.intended_s + _CREATE_S
    if sandbox.is_live or not may_appear:
        with suppress(*FAILURES):  # the next reap finds it gone, and records that
            why = f"reaped: {reason}"
            await asyncio.to_thread(ledger.set_ended, entry.name, why=why, at_s=ended_s)
    return Reaped(entry, Outcome.REMOVED, reason)
