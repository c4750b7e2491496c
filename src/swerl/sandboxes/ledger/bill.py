"""Add up the cost of sandboxes, from the ledger alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache

from swerl.core.liveness import Life, life
from swerl.sandboxes.ledger.store import HOUR_S, Entry, Ledger, Sum, add_up


class By(StrEnum):
    """The key by which a bill adds up."""

    RUN = "run"
    BACKEND = "backend"
    DAY = "day"
    """The UTC day on which a sandbox began."""


@dataclass(frozen=True, slots=True)
class BillLine:
    label: str
    num_sandboxes: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    """US dollars."""


@dataclass(frozen=True, slots=True)
class Bill:
    lines: tuple[BillLine, ...]
    num_open: int
    """Sandboxes in use; they count up to now."""
    num_unsettled: int
    """Sandboxes of dead owners; they count up to their deadline, if at all, until a `reap`."""


def bill(ledger: Ledger, *, by: By = By.RUN, run: str | None = None, since_s: float = 0.0) -> Bill:
    """Add up time and cost of the sandboxes that began after the Unix time `since_s`.

    `since_s` is exact to the hour. Raises RunError if the ledger cannot be read.
    """
    known = ledger.read()
    now_s = time.time()
    life_of = cache(life)
    num_open = num_unsettled = 0
    ended: list[Entry] = []
    for entry in known.entries:
        if run is not None and entry.use.run != run:
            continue
        # The end is recorded, so the owner's state does not matter.
        if entry.ended_s:
            ended.append(entry)
            continue
        owner = life_of(entry.use.owner)
        num_unsettled += owner is Life.DEAD
        num_open += owner is not Life.DEAD and entry.opened_s > 0
        # A sandbox counts up to its deadline at most if its owner does not run here.
        end_s = now_s if owner is Life.ALIVE else min(now_s, entry.deadline_s)
        ended.append(replace(entry, ended_s=end_s))
    lines: dict[str, BillLine] = {}
    for each in [*known.sums, *add_up(ended)]:
        if (run is None or each.run == run) and each.began_s + HOUR_S > since_s:
            label = _label(each, by)
            old = lines.get(label, BillLine(label))
            lines[label] = BillLine(
                label,
                old.num_sandboxes + each.num_sandboxes,
                old.seconds + each.seconds,
                old.cost + each.cost,
            )
    ordered = sorted(lines.values(), key=lambda line: (-line.cost, -line.seconds, line.label))
    if by is By.DAY:
        ordered.sort(key=lambda line: line.label)
    return Bill(tuple(ordered), num_open, num_unsettled)


def _label(each: Sum, by: By) -> str:
    match by:
        case By.RUN:
            return each.run
        case By.BACKEND:
            return each.backend
        case By.DAY:
            return datetime.fromtimestamp(each.began_s, UTC).date().isoformat()
