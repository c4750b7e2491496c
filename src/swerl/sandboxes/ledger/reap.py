"""Removing the sandboxes that nobody owns any more.

A sandbox goes where its owner is dead, where its deadline passed, and where it was not seen to
close. Within its lifetime, a sandbox of a living owner stays, and so does one whose owner nobody
here can judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swerl.core.liveness import Life, life
from swerl.sandboxes.ledger.census import Row, State, take
from swerl.sandboxes.ledger.lines import ended_line, opened_line
from swerl.sandboxes.ledger.provider import Answer, Provider, explain
from swerl.sandboxes.ledger.store import Ledger

_AT_ONCE = 8
_REMOVE_TIMEOUT_S = 60.0


class Outcome(StrEnum):
    """What became of a sandbox."""

    REMOVED = "removed"
    GONE = "gone"
    """Its provider had removed it already, or never made it."""
    FAILED = "failed"
    WOULD = "would remove"
    """Nothing was done: a rehearsal."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """One sandbox that nobody owns."""

    row: Row
    reason: str
    """Why it goes."""
    outcome: Outcome
    problem: str = ""
    """Why it could not be removed, and what to do."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which sandboxes to look at."""

    run: str | None = None
    only: Provider | None = None
    """Only this backend, asked with these settings."""
    living: bool = False
    """Whether those that are in use go as well."""


@dataclass(frozen=True, slots=True)
class Report:
    """What became of everything that nobody owns."""

    reaped: Sequence[Reaped]
    unreachable: Sequence[Answer]
    """Providers that could not be asked."""


async def reap(
    ledger: Ledger,
    scope: Scope,
    *,
    dry_run: bool = False,
    tell: Callable[[Reaped], None] = lambda _: None,
) -> Report:
    """Remove what nobody owns, a few at a time; `tell` hears of each. One's failure is its own."""
    census = await take(ledger, run=scope.run, only=scope.only)
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(row: Row, reason: str) -> Reaped:
        async with free:
            done = await _remove(
                ledger, row, reason, answer=census.answers.get(row.provider), dry_run=dry_run
            )
        tell(done)
        return done

    now_s = time.time()
    reasons = [(row, reason_to_go(row, now_s, living=scope.living)) for row in census.rows]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(row, reason)) for row, reason in reasons if reason]
    if not dry_run:
        await asyncio.to_thread(ledger.tidy)
    return Report([task.result() for task in running], census.unreachable)


async def reap_leftovers(ledger: Ledger, run: str) -> list[Reaped]:
    """Remove what earlier starts of a run left; asks no provider where they left nothing."""
    pages = await asyncio.to_thread(ledger.pages)
    if not any(
        not page.is_settled and page.head.run == run and life(page.head.owner) is Life.DEAD
        for page in pages
    ):
        return []
    return list((await reap(ledger, Scope(run=run))).reaped)


def reason_to_go(row: Row, now_s: float, *, living: bool = False) -> str:
    """Return why a sandbox goes; nothing where it stays. `living` takes those in use, too."""
    if row.state is State.ENDED:
        return ""
    if row.life is Life.DEAD:
        return "its owner is dead"
    if row.entry.in_doubt or row.entry.ended_s:
        return "it was not seen to close"
    if row.is_overdue(now_s):
        return "its deadline passed"
    return "every sandbox goes" if living else ""


async def _remove(
    ledger: Ledger, row: Row, reason: str, *, answer: Answer | None, dry_run: bool
) -> Reaped:
    backend = answer.backend if answer else None
    if backend is None:
        problem = answer.problem if answer else "it appeared just now; run the command again"
        return Reaped(row, reason, Outcome.FAILED, problem)
    if dry_run:
        return Reaped(row, reason, Outcome.WOULD)
    try:
        async with asyncio.timeout(_REMOVE_TIMEOUT_S):
            await backend.remove(row.entry.name)
    except Exception as error:  # noqa: BLE001  a plug-in of others may raise anything
        return Reaped(row, reason, Outcome.FAILED, explain(error))
    await asyncio.to_thread(_settle, ledger, row, reason)
    return Reaped(row, reason, Outcome.REMOVED if row.is_live else Outcome.GONE)


def _settle(ledger: Ledger, row: Row, reason: str) -> None:
    """Write the end. What was gone already cost money until its deadline at most."""
    entry, page, now_s = row.entry, row.page, time.time()
    if page is None or entry.ended_s:
        return
    lines = []
    if row.is_live and not entry.opened_s:
        lines.append(opened_line(entry.name, entry.intended_s, id=entry.name))
    ended_s = now_s if row.is_live else min(now_s, entry.deadline_s)
    lines.append(ended_line(entry.name, ended_s, why=f"reaped: {reason}"))
    try:
        ledger.append(page, *lines)
    except OSError:
        return  # the next reap finds it gone, and writes that
