"""`swerl sandbox ps | reap | bill`: list sandboxes, remove orphans, add up costs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swerl.cli._options import JsonOption, SettingsOption, sandbox_settings
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import run
from swerl.core.errors import InputError
from swerl.sandboxes.ledger import bill as bills
from swerl.sandboxes.ledger.bill import Bill, By
from swerl.sandboxes.ledger.reap import (
    ListedSandbox,
    Outcome,
    Provider,
    ProviderAnswer,
    Reaped,
    SandboxState,
    list_sandboxes,
)
from swerl.sandboxes.ledger.reap import reap as reap_them
from swerl.sandboxes.ledger.store import Ledger, default_ledger

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_LEAST_WIDTH = 140
"""Width of the table in columns; a narrower terminal wraps whole lines, not cells."""
_AFTER = "finished work is kept; run the same command again to resume"

OnlyOption = Annotated[
    str | None,
    typer.Option("--backend", help="Only this kind of sandbox, with the settings of --set."),
]


def ps(
    show_all: Annotated[
        bool, typer.Option("--all", help="Include recently ended sandboxes.")
    ] = False,
    backend: OnlyOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the sandboxes of every backend with owner, age and cost."""
    work = list_sandboxes(_ledger(), only=_only(backend, settings))
    found = run(work, after="nothing was changed")
    rows = [row for row in found.sandboxes if show_all or row.state is not SandboxState.ENDED]
    rows.sort(key=lambda row: row.entry.intended_s)
    warn_of(found.unreachable)
    if as_json:
        print_json([row_json(row) for row in rows])
        return
    if rows:
        wide = Console(width=max(console().width, _LEAST_WIDTH), highlight=False)
        wide.print(ps_table(rows))
    left_over = sum(bool(row.reason_to_go(time.time())) for row in found.sandboxes)
    console().print(
        f"{counted(len(rows), 'sandbox', 'sandboxes')}; "
        f"`swerl sandbox reap` would remove {left_over}"
    )
    if left_over:
        stderr().print("next: `swerl sandbox reap`, or first with --dry-run")


def reap(
    run_name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Only the sandboxes of this run.")
    ] = None,
    remove_all: Annotated[
        bool,
        typer.Option("--all", help="Include sandboxes in use, also of other hosts. Needs --yes."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm --all.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.")
    ] = False,
    backend: OnlyOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove sandboxes with a dead owner or a passed deadline; exit code 1 if one stays."""
    if remove_all and not (yes or dry_run):
        raise InputError(
            "--all removes sandboxes that are in use",
            hint="check with --all --dry-run, then add --yes",
        )
    work = reap_them(
        _ledger(),
        run=run_name,
        only=_only(backend, settings),
        living=remove_all,
        dry_run=dry_run,
        on_done=(lambda _: None) if as_json else tell_of,
    )
    report = run(work, after=_AFTER)
    warn_of(report.unreachable)
    if as_json:
        print_json([reaped_json(each) for each in report.reaped])
    counts = {kind: sum(each.outcome is kind for each in report.reaped) for kind in Outcome}
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    stderr().print(said or "nothing to reap")
    if counts[Outcome.FAILED]:
        stderr().print("next: fix that, then run the same command again")
        raise typer.Exit(1)


def bill(
    run_name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Only the sandboxes of this run.")
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="7d", help="Only sandboxes started within 90m, 12h, 7d or 4w.")
    ] = "",
    by: Annotated[By, typer.Option(help="Grouping of the sums.")] = By.RUN,
    as_json: JsonOption = False,
) -> None:
    """Add up number, time and cost of sandboxes."""
    since_s = time.time() - _seconds(since) if since else 0.0
    found = bills.bill(_ledger(), by=by, run=run_name, since_s=since_s)
    if as_json:
        print_json(found)
        return
    console().print(bill_table(found, by))
    if found.num_unsettled:
        stderr().print(
            f"not settled: {counted(found.num_unsettled, 'sandbox', 'sandboxes')} of dead owners; "
            "next: `swerl sandbox reap`"
        )


def _ledger() -> Ledger:
    """Return the user's ledger; print its notices."""
    ledger = default_ledger()
    for notice in ledger.notices():
        stderr().print(f"warning: {notice}", style="yellow", markup=False, soft_wrap=True)
    return ledger


def _only(backend: str | None, settings: list[str] | None) -> Provider | None:
    """Return the provider of --backend and --set. Raises InputError."""
    if backend is None:
        if settings:
            raise InputError("--set needs --backend", hint="name the backend of these settings")
        return None
    provider = Provider(backend, json.dumps(sandbox_settings(settings), sort_keys=True))
    provider.build()
    return provider


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise InputError(
            f"--since {text!r} is not a time span", hint="for example 90m, 12h, 7d or 4w"
        )
    return float(match[1]) * _UNITS_S[match[2]]


_AGE_UNITS_S = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
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
    for answer in unreachable:
        text = f"{answer.provider.backend} cannot be reached: {answer.problem}"
        stderr().print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def ps_table(rows: Sequence[ListedSandbox]) -> Table:
    """Return a table with one line per sandbox."""
    now_s = time.time()
    whole = ("owner", "age", "deadline", "cost", "state")
    titles = ("name", "backend", "image", "run", *whole)
    table = simple_table(*titles, whole=("name", "backend", *whole))
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
        image, run_name = escape(entry.image), escape(entry.use.run)
        named = (entry.name, entry.use.backend, image, run_name)
        table.add_row(*named, place, age, deadline, cost, state)
    return table


def _deadline(left_s: float) -> str:
    return f"in {_span(left_s)}" if left_s > 0 else f"{_span(-left_s)} ago"


def row_json(row: ListedSandbox) -> dict[str, Any]:
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
    """Return the host name of a sandbox's owner; empty if no ledger has it."""
    return row.entry.use.owner.host.partition("/")[0]


def tell_of(done: Reaped) -> None:
    """Print the result for one sandbox."""
    entry = done.sandbox.entry
    colour = _COLOURS.get(done.outcome, "cyan")
    text = f"{entry.use.backend} {entry.name} {entry.image}: {done.problem or done.reason}"
    console().print(f"[{colour}]{done.outcome}[/] {escape(text)}", soft_wrap=True)


def reaped_json(done: Reaped) -> dict[str, Any]:
    said = {"outcome": done.outcome, "reason": done.reason, "problem": done.problem}
    return {**row_json(done.sandbox), **said}


def bill_table(found: Bill, by: By) -> Table:
    """Return a bill as a table with its total."""
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
    """Return a time span in its two largest units."""
    whole = int(seconds)
    for (unit, size), (smaller, small) in pairwise(_AGE_UNITS_S):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {smaller}"
    return f"{whole} s"
