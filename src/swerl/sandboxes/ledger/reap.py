"""Compare the ledger with its providers, and remove the sandboxes that nobody owns.

`reap` removes a sandbox if its owner is dead, its deadline passed, or its removal was not
confirmed. Within its lifetime it keeps the sandbox of a living owner, and of an owner on another
host, whose state cannot be found out.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Protocol, runtime_checkable

from swerl.core import plugins
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SwerlError
from swerl.core.jobs import run_jobs
from swerl.core.liveness import Life, ProcessIdentity, life
from swerl.core.sandbox import LiveSandbox, owner_life, owner_pid
from swerl.images.store import default_store
from swerl.images.verify import UNUSED_S
from swerl.recipe.check import plugin_options
from swerl.recipe.sections import PluginSection
from swerl.sandboxes.ledger.store import FAILURES, Entry, Ledger, Use
from swerl.sandboxes.ledger.tracked import explain

GRACE_S = 60.0
"""Time past its deadline in which an owner or provider may still be closing a sandbox."""
_CLOSING_S = 10.0
"""A provider may list a sandbox for so long after its end."""
_AT_ONCE = 8
_ANSWER_TIMEOUT_S = 20.0
_REMOVE_TIMEOUT_S = 60.0


class SandboxState(StrEnum):
    """The state of a sandbox, by its ledger and its provider."""

    INTENDED = "intended"
    """Its owner is about to create it."""
    OPEN = "open"
    """It is in use."""
    LOST = "lost"
    """It should exist, but its provider does not list it."""
    ORPHAN = "orphan"
    """It exists, but its owner is dead or has recorded its end."""
    UNKNOWN = "unknown"
    """It may be an orphan: its provider cannot be reached."""
    ENDED = "ended"


class Outcome(StrEnum):
    """The result of reaping one sandbox."""

    REMOVED = "removed"
    GONE = "gone"
    """Its provider had removed it already, or never made it."""
    FAILED = "failed"
    WOULD = "would remove"
    """Nothing was done: a dry run."""


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


@runtime_checkable
class SnapshotCollector(Protocol):
    """A SandboxBackend with snapshots that stay when their owner is killed."""

    async def collect_snapshots(self, *, before_s: float, dry_run: bool = False) -> int:
        """Remove the unused snapshots of dead owners, and those outside of the image store taken
        before this Unix time; return their number."""


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """The sandboxes that a provider lists."""

    provider: Provider
    backend: SandboxBackend | None = None
    live: Mapping[str, LiveSandbox] | None = None
    """Its sandboxes by name; None if it cannot be reached."""
    problem: str = ""
    """The reason that it cannot be reached, and a remedy."""


@dataclass(frozen=True, slots=True)
class ListedSandbox:
    """One sandbox of the ledger or of a provider."""

    entry: Entry
    """Made from its name and its provider's list if no ledger holds it; then it has no row."""
    provider: Provider
    state: SandboxState
    life: Life
    """The state of its owner."""
    is_live: bool = False
    """True if its provider lists it."""

    def cost(self, now_s: float) -> float:
        """Return its cost so far in US dollars; a live one without `opened_s` from its intent."""
        entry = self.entry
        if self.is_live and not entry.opened_s:
            entry = replace(entry, opened_s=entry.intended_s)
        return entry.cost(now_s)

    def reason_to_go(self, now_s: float, *, living: bool = False) -> str:
        """Return why `reap` removes it; empty if it stays. `living` includes those in use."""
        if self.state is SandboxState.ENDED:
            return ""
        if self.life is Life.DEAD:
            return "its owner is dead"
        if self.entry.in_doubt or self.entry.ended_s:
            return "it was not seen to close"
        if self.entry.row and now_s > self.entry.deadline_s + GRACE_S:
            return "its deadline passed"
        return "every sandbox goes" if living else ""


@dataclass(frozen=True, slots=True)
class Listing:
    """All sandboxes, and the answers of their providers."""

    sandboxes: Sequence[ListedSandbox]
    answers: Mapping[Provider, ProviderAnswer]
    unreachable: Sequence[ProviderAnswer]
    """The unreachable providers of recorded sandboxes; a backend that was never used is absent."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """One sandbox that nobody owns, and the result of its removal."""

    sandbox: ListedSandbox
    reason: str
    """Why it is removed."""
    outcome: Outcome
    problem: str = ""
    """Why it could not be removed, and a remedy."""


@dataclass(frozen=True, slots=True)
class ReapReport:
    """The results of one `reap`."""

    reaped: Sequence[Reaped]
    unreachable: Sequence[ProviderAnswer]


async def reap(
    ledger: Ledger,
    *,
    run: str | None = None,
    only: Provider | None = None,
    living: bool = False,
    dry_run: bool = False,
    on_done: Callable[[Reaped], None] = lambda _: None,
) -> ReapReport:
    """Remove the sandboxes and parts of snapshots that nobody owns; a failure concerns one sandbox.

    `run` and `only` restrict the search as in `list_sandboxes`. `living` also removes sandboxes in
    use. `on_done` gets each result. Raises RunError if the ledger cannot be read.
    """
    listing = await list_sandboxes(ledger, run=run, only=only)
    now_s = time.time()
    found = [(each, each.reason_to_go(now_s, living=living)) for each in listing.sandboxes]

    async def remove(one: tuple[ListedSandbox, str]) -> Reaped:
        answer = listing.answers.get(one[0].provider)
        return await _remove(ledger, *one, answer=answer, dry_run=dry_run)

    due = [(each, reason) for each, reason in found if reason]
    reaped = await run_jobs(due, remove, limit=_AT_ONCE, on_done=on_done)
    if not dry_run:
        await asyncio.to_thread(ledger.tidy)  # it may wait for other processes
        with suppress(OSError):  # nobody left a part of a snapshot in a store without access
            await asyncio.to_thread(default_store().remove_leftovers)
        if run is None and only is None:
            await collect_snapshots(ledger)
    return ReapReport(reaped, listing.unreachable)


async def collect_snapshots(ledger: Ledger, *, dry_run: bool = False) -> int:
    """Remove the old and abandoned snapshots that backends of this machine keep.

    Returns their number. A backend that cannot be reached is passed over.
    """
    entries = (await asyncio.to_thread(ledger.read)).entries
    used = {Provider(entry.use.backend, entry.use.settings) for entry in entries}
    num_removed, before_s = 0, time.time() - UNUSED_S
    for provider in used | {Provider(name) for name in plugins.names("sandboxes")}:
        try:
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                backend = provider.build()
                if isinstance(backend, SnapshotCollector):
                    num = await backend.collect_snapshots(before_s=before_s, dry_run=dry_run)
                    num_removed += num
        except Exception:  # noqa: BLE001  a third party's plug-in may raise anything
            continue
    return num_removed


async def reap_leftovers(ledger: Ledger, run: str) -> list[Reaped]:
    """Remove the sandboxes that earlier starts of a run left; ask no provider if there are none."""
    if not await asyncio.to_thread(ledger.has_leftovers, run):
        return []
    return list((await reap(ledger, run=run)).reaped)


async def list_sandboxes(
    ledger: Ledger, *, run: str | None = None, only: Provider | None = None
) -> Listing:
    """Read the ledger and ask the providers. Raises RunError if the ledger cannot be read.

    `run` excludes other runs and the sandboxes that no ledger holds. `only` excludes other
    backends; its own settings replace the recorded ones.
    """

    async def entries() -> list[Entry]:
        known = (await asyncio.to_thread(ledger.read)).entries
        return [
            entry
            for entry in known
            if (run is None or entry.use.run == run)
            and (only is None or entry.use.backend == only.backend)
        ]

    def provider_of(entry: Entry) -> Provider:
        return only or Provider(entry.use.backend, entry.use.settings)

    before = await entries()
    needed = {provider_of(entry) for entry in before if not entry.is_settled}
    needed |= {only} if only else set()
    # Only sandboxes that were open before the question can be missing in the answer.
    opened = {entry.name for entry in before if entry.opened_s and not entry.ended_s}
    asked_s = time.time()
    others = set() if run or only else {Provider(name) for name in plugins.names("sandboxes")}
    found = await asyncio.gather(*map(_ask, needed | others))
    answers = {answer.provider: answer for answer in found}
    life_of = cache(life)
    listed = []
    # A provider's list is older than the entries read now, and newer than `opened`.
    for entry in await entries():
        provider = provider_of(entry)
        answer = answers.get(provider)
        was_open = entry.name in opened
        owner = life_of(entry.use.owner)
        state, is_live = _judge(entry, owner, answer, was_open=was_open, asked_s=asked_s)
        listed.append(ListedSandbox(entry, provider, state, owner, is_live))
    if not run:
        listed += _unlisted({each.entry.name for each in listed}, found)
    unreachable = [each for each in found if each.live is None and each.provider in needed]
    return Listing(listed, answers, unreachable)


async def _ask(provider: Provider) -> ProviderAnswer:
    try:
        backend = provider.build()
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            live = {each.name: each for each in await backend.live()}
    except TimeoutError:
        return ProviderAnswer(provider, problem=f"no answer within {_ANSWER_TIMEOUT_S:g} s")
    except SwerlError as error:
        return ProviderAnswer(provider, problem=explain(error))
    except Exception as error:  # noqa: BLE001  a third party's plug-in may raise anything
        return ProviderAnswer(provider, problem=f"{type(error).__name__}: {explain(error)}")
    return ProviderAnswer(provider, backend, live)


def _judge(
    entry: Entry, owner: Life, answer: ProviderAnswer | None, *, was_open: bool, asked_s: float
) -> tuple[SandboxState, bool]:
    """Return a recorded sandbox's state, and whether its provider lists it."""
    live = answer.live if answer else None
    is_live = live is not None and entry.name in live
    if entry.ended_s:
        has_leaked = is_live and entry.ended_s < asked_s - _CLOSING_S
        return (SandboxState.ORPHAN if has_leaked else SandboxState.ENDED), has_leaked
    if owner is Life.DEAD or entry.in_doubt:
        absent = SandboxState.UNKNOWN if live is None else SandboxState.LOST
        return (SandboxState.ORPHAN if is_live else absent), is_live
    if live is not None and was_open and not is_live:
        return SandboxState.LOST, False
    return (SandboxState.OPEN if entry.opened_s else SandboxState.INTENDED), is_live


def _unlisted(known: set[str], answers: Iterable[ProviderAnswer]) -> Iterator[ListedSandbox]:
    """Yield the sandboxes that exist without a record, once each.

    A name that swerl did not make may be another program's sandbox, which is left alone.
    """
    for answer in answers:
        for name, found in (answer.live or {}).items():
            pid = owner_pid(name)
            if name in known or not pid:
                continue
            known.add(name)
            began_s = found.started_unix_s
            owner = owner_life(name, began_s)
            use = Use(answer.provider.backend, "{}", "", ProcessIdentity(pid, 0, "", "", ""))
            entry = Entry(use, name, found.image, began_s, 0.0, id=found.id, opened_s=began_s)
            state = SandboxState.ORPHAN if owner is Life.DEAD else SandboxState.OPEN
            yield ListedSandbox(entry, answer.provider, state, owner, is_live=True)


async def _remove(
    ledger: Ledger,
    sandbox: ListedSandbox,
    reason: str,
    *,
    answer: ProviderAnswer | None,
    dry_run: bool,
) -> Reaped:
    backend = answer.backend if answer else None
    if backend is None:
        problem = answer.problem if answer else "it appeared just now; run the command again"
        return Reaped(sandbox, reason, Outcome.FAILED, problem)
    if dry_run:
        return Reaped(sandbox, reason, Outcome.WOULD)
    try:
        async with asyncio.timeout(_REMOVE_TIMEOUT_S):
            await backend.remove(sandbox.entry.name)
    except Exception as error:  # noqa: BLE001  a third party's plug-in may raise anything
        return Reaped(sandbox, reason, Outcome.FAILED, explain(error))
    if sandbox.entry.row and not sandbox.entry.ended_s:
        with suppress(*FAILURES):  # the next reap finds it gone, and records that
            await asyncio.to_thread(_record_end, ledger, sandbox, reason)
    return Reaped(sandbox, reason, Outcome.REMOVED if sandbox.is_live else Outcome.GONE)


def _record_end(ledger: Ledger, sandbox: ListedSandbox, reason: str) -> None:
    """Record the end. A sandbox that was gone before cost money until its deadline at most."""
    entry, now_s = sandbox.entry, time.time()
    ended_s = now_s if sandbox.is_live else min(now_s, entry.deadline_s)
    with closing(ledger.open()) as db:
        if sandbox.is_live and not entry.opened_s:
            # It has existed, so it costs money from its intent on.
            ledger.set_opened(db, entry, id=entry.name, at_s=entry.intended_s)
        ledger.set_ended(db, entry.name, why=f"reaped: {reason}", at_s=ended_s)
