"""What sandboxes cost, from the ledger alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum

from swerl.core.liveness import Life, life
from swerl.sandboxes.ledger.entry import HOUR_S, Entry, Page, Sum, fold
from swerl.sandboxes.ledger.store import Ledger


class By(StrEnum):
    """What to add up by."""

    RUN = "run"
    BACKEND = "backend"
    DAY = "day"
    """The day on which a sandbox began, in UTC."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a bill."""

    label: str
    num_sandboxes: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    """US dollars."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What was used."""

    lines: tuple[Line, ...]
    num_open: int
    """Sandboxes that are counted as far as they have lived."""
    num_unsettled: int
    """Sandboxes of dead owners, counted up to their deadline or not at all until a `reap`."""


def bill(ledger: Ledger, *, by: By = By.RUN, run: str | None = None, since_s: float = 0.0) -> Bill:
    """Add up seconds and cost of the sandboxes that began after `since_s`, seconds since 1970.

    Those that ended long ago are known by the hour in which they began, after a month by the day.
    """
    known = ledger.everything()
    sums = known.sums
    open_count = unsettled = 0
    now_s = time.time()
    for page in known.pages:
        if run is None or page.head.run == run:
            is_dead = life(page.head.owner) is Life.DEAD
            unsettled += len(page.unfinished) * is_dead
            open_count += sum(1 for each in page.unfinished if each.opened_s) * (not is_dead)
        sums += [*page.sums, *fold(_up_to(page, now_s), page.head)]
    lines: dict[str, Line] = {}
    for each in sums:
        if (run is None or each.run == run) and each.began_s + HOUR_S > since_s:
            label = _label(each, by)
            old = lines.get(label, Line(label))
            lines[label] = Line(
                label,
                old.num_sandboxes + each.num_sandboxes,
                old.seconds + each.seconds,
                old.cost + each.cost,
            )
    ordered = sorted(lines.values(), key=lambda line: (-line.cost, -line.seconds, line.label))
    if by is By.DAY:
        ordered.sort(key=lambda line: line.label)
    return Bill(tuple(ordered), open_count, unsettled)


def _label(each: Sum, by: By) -> str:
    match by:
        case By.RUN:
            return each.run
        case By.BACKEND:
            return each.backend
        case By.DAY:
            return datetime.fromtimestamp(each.began_s, UTC).date().isoformat()


def _up_to(page: Page, now_s: float) -> Iterator[Entry]:
    """Yield a file's sandboxes, the unfinished ones as if they ended now.

    One without a living owner here lives to its deadline at most.
    """
    alive = life(page.head.owner) is Life.ALIVE
    for entry in page.entries.values():
        end_s = now_s if alive else min(now_s, entry.deadline_s)
        yield entry if entry.ended_s else replace(entry, ended_s=end_s)
