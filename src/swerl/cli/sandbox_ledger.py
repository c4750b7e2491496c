"""`swerl sandbox ps | reap | bill`: what exists, what nobody owns any more, what it cost."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swerl.cli._sandbox_options import SettingsOption
from swerl.ledger.bill import By

if TYPE_CHECKING:
    from rich.table import Table

    from swerl.ledger.bill import Bill
    from swerl.ledger.census import Row
    from swerl.ledger.provider import Answer, Provider
    from swerl.ledger.reap import Reaped

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
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
_LEAST_WIDTH = 140
"""Columns of the table of sandboxes: a narrower terminal wraps whole lines, not cells."""
_AFTER = "what is done is done; the same command goes on"

OnlyOption = Annotated[
    str | None,
    typer.Option("--backend", help="Only this kind of sandbox, with the settings of --set."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]


def ps(
    show_all: Annotated[
        bool, typer.Option("--all", help="Show those that ended lately, too.")
    ] = False,
    backend: OnlyOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the sandboxes of every backend: whose they are, how old, what they cost."""
    from rich.console import Console

    from swerl.cli._output import console, stderr
    from swerl.cli._run import run
    from swerl.ledger import census
    from swerl.ledger.store import default_ledger

    only = _only(backend, settings)
    found = run(census.take(default_ledger(), only=only), after="nothing was changed")
    rows = [row for row in found.rows if show_all or row.state is not census.State.ENDED]
    rows.sort(key=lambda row: row.entry.intended_s)
    _warn_of(found.unreachable)
    if as_json:
        _print_json([_as_dict(row) for row in rows])
        return
    if rows:
        wide = Console(width=max(console().width, _LEAST_WIDTH), highlight=False)
        wide.print(_ps_table(rows))
    orphans = sum(row.state in {census.State.ORPHAN, census.State.LOST} for row in rows)
    console().print(f"{len(rows)} sandboxes, {orphans} that nobody owns or finds")
    if orphans:
        stderr().print("next: `swerl sandbox reap`")


def reap(
    run_name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Only the sandboxes of this run.")
    ] = None,
    remove_all: Annotated[
        bool, typer.Option("--all", help="Those in use, too, also of other hosts. Needs --yes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm --all.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
    backend: OnlyOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove sandboxes whose owner is dead or whose deadline passed; exit code 1 if one stays."""
    from swerl.cli._output import stderr
    from swerl.cli._run import run
    from swerl.errors import InputError
    from swerl.ledger.reap import Outcome, Scope
    from swerl.ledger.reap import reap as reap_them
    from swerl.ledger.store import default_ledger

    if remove_all and not (yes or dry_run):
        message = "--all removes sandboxes that are in use"
        raise InputError(message, hint="look with --all --dry-run, then add --yes")
    scope = Scope(run=run_name, only=_only(backend, settings), living=remove_all)
    tell = (lambda _: None) if as_json else _tell
    work = reap_them(default_ledger(), scope, dry_run=dry_run, tell=tell)
    report = run(work, after=_AFTER)
    _warn_of(report.unreachable)
    if as_json:
        _print_json([_reaped_dict(each) for each in report.reaped])
    counts = {kind: sum(each.outcome is kind for each in report.reaped) for kind in Outcome}
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    stderr().print(said or "nothing to reap")
    if counts[Outcome.FAILED]:
        stderr().print("next: mend that, then run the same command again")
        raise typer.Exit(1)


def bill(
    run_name: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Only the sandboxes of this run.")
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="7d", help="Only what began within: 90m, 12h, 7d or 4w.")
    ] = "",
    by: Annotated[By, typer.Option(help="What to add up by.")] = By.RUN,
    as_json: JsonOption = False,
) -> None:
    """Say how many sandboxes were used, for how long, and what they cost."""
    from swerl.cli._output import console, stderr
    from swerl.ledger import bill as bills
    from swerl.ledger.store import default_ledger

    since_s = time.time() - _seconds(since) if since else 0.0
    found = bills.bill(default_ledger(), by=by, run=run_name, since_s=since_s)
    if as_json:
        from dataclasses import asdict

        _print_json(asdict(found))
        return
    console().print(_bill_table(found, by))
    if found.num_unsettled:
        stderr().print(
            f"{found.num_unsettled} sandboxes of dead owners are not settled; "
            "next: `swerl sandbox reap`"
        )


def _only(backend: str | None, settings: list[str] | None) -> Provider | None:
    """Return the one provider that the command line names. Raises InputError."""
    import json

    from swerl.errors import InputError
    from swerl.ledger.provider import Provider
    from swerl.recipe.load import read_settings

    if backend is None:
        if settings:
            message = "--set needs --backend"
            raise InputError(message, hint="say whose settings these are")
        return None
    provider = Provider(backend, json.dumps(read_settings(settings or ()), sort_keys=True))
    provider.build()
    return provider


def _warn_of(unreachable: Sequence[Answer]) -> None:
    from rich.markup import escape

    from swerl.cli._output import stderr

    for answer in unreachable:
        text = f"{answer.provider.backend} cannot be reached: {answer.problem}"
        stderr().print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def _ps_table(rows: list[Row]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    now_s = time.time()
    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("name", "backend", "image", "run", "owner", "age", "deadline", "cost", "state"):
        table.add_column(title, no_wrap=title not in {"image", "run"}, overflow="fold")
    for row in rows:
        entry = row.entry
        began_s = entry.opened_s or entry.intended_s
        deadline = "" if entry.ended_s or not row.page else _deadline(entry.deadline_s - now_s)
        state = f"[{_COLOURS.get(row.state, 'dim')}]{row.state}[/]"
        age = _span((entry.ended_s or now_s) - began_s) if began_s else ""
        owner = f"{row.pid or ''} {row.life}".strip()
        place = f"{owner} ({row.host})" if row.life == "elsewhere" and row.host else owner
        cost = f"${entry.cost(now_s):.4f}" if entry.price else ""
        table.add_row(
            *(entry.name, row.backend, entry.image, row.run, place, age, deadline, cost, state)
        )
    return table


def _deadline(left_s: float) -> str:
    return f"in {_span(left_s)}" if left_s > 0 else f"{_span(-left_s)} ago"


def _as_dict(row: Row) -> dict[str, Any]:
    entry, now_s = row.entry, time.time()
    return {
        "name": entry.name,
        "id": entry.id,
        "backend": row.backend,
        "image": entry.image,
        "run": row.run,
        "state": row.state,
        "exists": row.is_live,
        "owner": {"pid": row.pid, "host": row.host, "state": row.life},
        "intended_unix_s": entry.intended_s,
        "opened_unix_s": entry.opened_s,
        "deadline_unix_s": entry.deadline_s if row.page else None,
        "ended_unix_s": entry.ended_s,
        "why": entry.why,
        "price_usd_per_hour": entry.price,
        "cost_usd": entry.cost(now_s),
    }


def _tell(done: Reaped) -> None:
    from rich.markup import escape

    from swerl.cli._output import console

    row = done.row
    colour = _COLOURS.get(done.outcome, "cyan")
    text = f"{row.backend} {row.entry.name} {row.entry.image}: {done.problem or done.reason}"
    console().print(f"[{colour}]{done.outcome}[/] {escape(text)}", soft_wrap=True)


def _reaped_dict(done: Reaped) -> dict[str, Any]:
    said = {"outcome": done.outcome, "reason": done.reason, "problem": done.problem}
    return {**_as_dict(done.row), **said}


def _bill_table(found: Bill, by: By) -> Table:
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


def _seconds(text: str) -> float:
    from swerl.errors import InputError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        message = f"--since {text!r} is no span of time"
        raise InputError(message, hint="for example 90m, 12h, 7d or 4w")
    return float(match[1]) * _UNITS_S[match[2]]


def _span(seconds: float) -> str:
    """Return a span of time in its two largest units."""
    whole = int(seconds)
    for unit, smaller in (("d", "h"), ("h", "m"), ("m", "s")):
        size, small = int(_UNITS_S[unit]), int(_UNITS_S[smaller])
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {smaller}"
    return f"{whole} s"


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))
