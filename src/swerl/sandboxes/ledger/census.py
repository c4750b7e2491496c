"""The ledger joined with what the providers say: every sandbox, and how it stands with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from swerl.core.liveness import Life, life
from swerl.core.sandbox import owner_life, owner_pid
from swerl.sandboxes.ledger.entry import Entry, Page
from swerl.sandboxes.ledger.provider import Answer, Provider, ask, installed
from swerl.sandboxes.ledger.store import Ledger

GRACE_S = 60.0
"""Seconds past its deadline in which its owner or provider may still be closing a sandbox."""
_CLOSING_S = 10.0
"""A sandbox that ended no longer ago may still be on the provider's list."""


class State(StrEnum):
    """How it stands with a sandbox."""

    INTENDED = "intended"
    """Its owner is about to create it."""
    OPEN = "open"
    """It is in use."""
    LOST = "lost"
    """It should exist, and its provider does not know it."""
    ORPHAN = "orphan"
    """It exists, and its owner is dead or believes that it is closed."""
    UNKNOWN = "unknown"
    """It may be an orphan: its provider cannot be reached."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Row:
    """One sandbox."""

    entry: Entry
    """What the ledger says, or what the provider says of a sandbox that no ledger holds."""
    provider: Provider
    state: State
    life: Life
    """What is known about its owner."""
    page: Page | None = None
    """The file of the ledger that holds it."""
    is_live: bool = False
    """Whether the provider says that it exists."""

    @property
    def backend(self) -> str:
        """Name of its backend."""
        return self.provider.backend

    @property
    def run(self) -> str:
        """What it is used for; empty where no ledger says."""
        return self.page.head.run if self.page else ""

    @property
    def pid(self) -> int:
        """Process id of its owner."""
        return self.page.head.owner.pid if self.page else owner_pid(self.entry.name)

    @property
    def host(self) -> str:
        """Host name of its owner; empty where no ledger says."""
        return self.page.head.owner.host.partition("/")[0] if self.page else ""

    def cost(self, now_s: float) -> float:
        """Return its cost so far in US dollars; what exists unopened costs since its intent."""
        entry = self.entry
        if self.is_live and not entry.opened_s:
            entry = replace(entry, opened_s=entry.intended_s)
        return entry.cost(now_s)

    def is_overdue(self, now_s: float) -> bool:
        """Say whether its deadline passed so long ago that nobody can be using it."""
        return self.page is not None and now_s > self.entry.deadline_s + GRACE_S


@dataclass(frozen=True, slots=True)
class Census:
    """All sandboxes, and what their providers answered."""

    rows: Sequence[Row]
    answers: Mapping[Provider, Answer]
    unreachable: Sequence[Answer]
    """Providers that sandboxes of the ledger need. A backend that was never used is not listed."""


async def take(ledger: Ledger, *, run: str | None = None, only: Provider | None = None) -> Census:
    """Read the ledger and ask the providers.

    `run` leaves out other runs, and the sandboxes that no ledger holds. `only` leaves out other
    backends, and is asked with its own settings whatever the ledger says.
    """
    before = await _pages(ledger, run, only)
    needed = {only or Provider.of(page.head) for page in before if not page.is_settled}
    if only:
        needed.add(only)
    opened = {entry.name for page in before for entry in page.unfinished if entry.opened_s}
    asked_s = time.time()
    found = await ask(needed | set(() if run or only else installed()))
    answers = {each.provider: each for each in found}
    rows = []
    for page in await _pages(ledger, run, only):
        answer = answers.get(only or Provider.of(page.head))
        its_life = life(page.head.owner)
        for entry in page.entries.values():
            row = Row(entry, only or Provider.of(page.head), State.ENDED, its_life, page)
            rows.append(_judge(row, answer, was_open=entry.name in opened, asked_s=asked_s))
    if not run:
        rows += _unlisted({row.entry.name for row in rows}, found)
    unreachable = [each for each in found if each.live is None and each.provider in needed]
    return Census(rows, answers, unreachable)


async def _pages(ledger: Ledger, run: str | None, only: Provider | None) -> list[Page]:
    return [
        page
        for page in await asyncio.to_thread(ledger.pages)
        if (run is None or page.head.run == run)
        and (only is None or page.head.backend == only.backend)
    ]


def _judge(row: Row, answer: Answer | None, *, was_open: bool, asked_s: float) -> Row:
    """Say how it stands. A provider's list is older than the entry, and newer than `was_open`."""
    entry = row.entry
    live = answer.live if answer else None
    is_live = live is not None and entry.name in live
    if entry.ended_s:
        leaked = is_live and entry.ended_s < asked_s - _CLOSING_S
        return replace(row, state=State.ORPHAN if leaked else State.ENDED, is_live=leaked)
    if row.life is Life.DEAD or entry.in_doubt:
        absent = State.UNKNOWN if live is None else State.LOST
        return replace(row, state=State.ORPHAN if is_live else absent, is_live=is_live)
    if live is not None and was_open and not is_live:
        return replace(row, state=State.LOST)
    state = State.OPEN if entry.opened_s else State.INTENDED
    return replace(row, state=state, is_live=is_live)


def _unlisted(known: set[str], answers: Sequence[Answer]) -> Iterator[Row]:
    """Yield what exists without being in the ledger; two settings may lead to one provider.

    What has no name of swerl's own making may be something else, and is left alone.
    """
    for answer in answers:
        for name, found in (answer.live or {}).items():
            if name in known or not owner_pid(name):
                continue
            known.add(name)
            began_s = found.started_unix_s
            its_life = owner_life(name, began_s)
            state = State.ORPHAN if its_life is Life.DEAD else State.OPEN
            entry = Entry(name, found.image, began_s, 0.0, id=found.id, opened_s=began_s)
            yield Row(entry, answer.provider, state, its_life, is_live=True)
