"""How `swerl sandbox ps | reap | bill` show what they found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from swerl.sandboxes.ledger.bill import Bill, By
    from swerl.sandboxes.ledger.reap import ListedSandbox, ProviderAnswer, Reaped

_UNITS_S = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_COLOURS = {
    "open": "green",
    "intended": "cyan",
    "lost": "yellow",
    "orphan": "red",
    "unknown": "yellow",
    "removed": "green",
    "gone": "green",
    "failed": "red",
}


def warn_of(unreachable: Sequence[ProviderAnswer]) -> None:
    """Print a line of warning for each provider that could not be asked."""
    from rich.markup import escape

    from swerl.cli._output import stderr

    for answer in unreachable:
        text = f"{answer.provider.backend} cannot be reached: {answer.problem}"
        stderr().print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def ps_table(rows: Sequence[ListedSandbox]) -> Table:
    """Lay out sandboxes, a line each."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    now_s = time.time()
    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("name", "backend", "image", "run", "owner", "age", "deadline", "cost", "state"):
        table.add_column(title, no_wrap=title not in {"image", "run"}, overflow="fold")
    for row in rows:
        entry = row.entry
        began_s = entry.opened_s or entry.intended_s
        deadline = "" if entry.ended_s or not entry.row else _deadline(entry.deadline_s - now_s)
        state = f"[{_COLOURS.get(row.state, 'dim')}]{row.state}[/]"
        age = _span((entry.ended_s or now_s) - began_s) if began_s else ""
        owner = f"{entry.use.owner.pid} {row.life}"
        host = _host(row)
        place = f"{owner} ({host})" if row.life == "elsewhere" and host else owner
        cost = f"${row.cost(now_s):.4f}" if entry.price else ""
        table.add_row(
            *(
                entry.name,
                entry.use.backend,
                escape(entry.image),
                escape(entry.use.run),
                place,
                age,
                deadline,
                cost,
                state,
            )
        )
    return table


def _deadline(left_s: float) -> str:
    return f"in {_span(left_s)}" if left_s > 0 else f"{_span(-left_s)} ago"


def row_json(row: ListedSandbox) -> dict[str, Any]:
    """Return a sandbox as JSON."""
    entry, now_s = row.entry, time.time()
    return {
        "name": entry.name,
        "id": entry.id,
        "backend": entry.use.backend,
        "image": entry.image,
        "run": entry.use.run,
        "state": row.state,
        "exists": row.is_live,
        "owner": {"pid": entry.use.owner.pid, "host": _host(row), "state": row.life},
        "intended_unix_s": entry.intended_s,
        "opened_unix_s": entry.opened_s,
        "deadline_unix_s": entry.deadline_s if entry.row else None,
        "ended_unix_s": entry.ended_s,
        "why": entry.why,
        "price_usd_per_hour": entry.price,
        "cost_usd": row.cost(now_s),
    }


def _host(row: ListedSandbox) -> str:
    """Return the host name of a sandbox's owner; empty if no ledger holds it."""
    return row.entry.use.owner.host.partition("/")[0]


def tell_of(done: Reaped) -> None:
    """Print what became of one sandbox."""
    from rich.markup import escape

    from swerl.cli._output import console

    entry = done.sandbox.entry
    colour = _COLOURS.get(done.outcome, "cyan")
    text = f"{entry.use.backend} {entry.name} {entry.image}: {done.problem or done.reason}"
    console().print(f"[{colour}]{done.outcome}[/] {escape(text)}", soft_wrap=True)


def reaped_json(done: Reaped) -> dict[str, Any]:
    """Return a sandbox and what became of it as JSON."""
    said = {"outcome": done.outcome, "reason": done.reason, "problem": done.problem}
    return {**row_json(done.sandbox), **said}


def bill_table(found: Bill, by: By) -> Table:
    """Lay out a bill, with its total below."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, show_footer=True)
    lines = found.lines
    num, seconds = sum(x.num_sandboxes for x in lines), sum(x.seconds for x in lines)
    table.add_column(by.value, "total")
    for title, total in (
        ("sandboxes", f"{num:,}"),
        ("hours", f"{seconds / 3600:,.2f}"),
        ("cost", f"${sum(x.cost for x in lines):,.4f}"),
    ):
        table.add_column(title, total, justify="right")
    for line in lines:
        hours, cost = f"{line.seconds / 3600:,.2f}", f"${line.cost:,.4f}"
        table.add_row(line.label, f"{line.num_sandboxes:,}", hours, cost)
    return table


def _span(seconds: float) -> str:
    """Return a span of time in its two largest units."""
    whole = int(seconds)
    for (unit, size), (smaller, small) in pairwise(_UNITS_S):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {smaller}"
    return f"{whole} s"
