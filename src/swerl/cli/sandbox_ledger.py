"""`swerl sandbox ps | reap`: list sandboxes with their costs, remove orphans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from swerl.cli._options import JsonOption
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import run
from swerl.core.errors import InputError
from swerl.sandboxes import ledger
from swerl.sandboxes.ledger import ListedSandbox, Outcome, Reaped, SandboxState

_LEAST_WIDTH = 140
"""Width of the table in columns; a narrower terminal wraps whole lines, not cells."""
_UNITS_S = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
_COLOURS = {
    "open": "green",
    "intended": "cyan",
    "lost": "yellow",
    "orphan": "red",
    "removed": "green",
    "failed": "red",
}

RunOption = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="Only the sandboxes of this run.")
]


def ps(
    run_name: RunOption = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Include sandboxes that have ended.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the sandboxes of every backend with owner, age and cost."""
    work = ledger.list_sandboxes(ledger.default_ledger(), run=run_name)
    sandboxes = run(work, after="nothing was changed")
    rows = [row for row in sandboxes if show_all or row.state is not SandboxState.ENDED]
    for name, problem in sorted({(row.entry.backend, row.problem) for row in rows if row.problem}):
        text = f"[yellow]warning:[/] {name} cannot be reached: {escape(problem)}"
        stderr().print(text, soft_wrap=True)
    if as_json:
        print_json([_row_json(row) for row in rows])
        return
    if rows:
        wide = Console(width=max(console().width, _LEAST_WIDTH), highlight=False)
        wide.print(_table(rows))
    num_orphans = sum(bool(row.reason) for row in rows)
    dollars = sum(row.entry.cost(time.time()) for row in rows)
    console().print(
        f"{counted(len(rows), 'sandbox', 'sandboxes')}, ${dollars:.4f}; "
        f"`swerl sandbox reap` would remove {num_orphans}"
    )


def reap(
    run_name: RunOption = None,
    remove_all: Annotated[
        bool,
        typer.Option("--all", help="Include sandboxes in use, also of other hosts. Needs --yes."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm --all.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove sandboxes with a dead owner or a passed deadline; exit code 1 if one stays."""
    if remove_all and not (yes or dry_run):
        raise InputError(
            "--all removes sandboxes that are in use",
            hint="check with --all --dry-run, then add --yes",
        )
    work = ledger.reap(
        ledger.default_ledger(),
        run=run_name,
        living=remove_all,
        dry_run=dry_run,
        on_done=(lambda _: None) if as_json else _print_result,
    )
    results = run(work, after="finished work is kept; run the same command again to resume")
    if as_json:
        print_json([asdict(result) for result in results])
    counts = {kind: sum(result.outcome is kind for result in results) for kind in Outcome}
    text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    stderr().print(text or "nothing to reap")
    if counts[Outcome.FAILED]:
        stderr().print("next: fix that, then run the same command again")
        raise typer.Exit(1)


def _table(rows: Sequence[ListedSandbox]) -> Table:
    now_s = time.time()
    whole = ("owner", "age", "deadline", "cost", "state")
    titles = ("name", "backend", "image", "run", *whole)
    table = simple_table(*titles, whole=("name", "backend", *whole))
    for row in rows:
        entry = row.entry
        host = f" ({entry.owner.host.partition('/')[0]})" if row.owner == "elsewhere" else ""
        to_go_s = entry.deadline_s - now_s
        deadline = f"in {_span(to_go_s)}" if to_go_s > 0 else f"{_span(-to_go_s)} ago"
        table.add_row(
            *(entry.name, entry.backend, escape(entry.image), escape(entry.run)),
            f"{entry.owner.pid} {row.owner}{host}",
            _span((entry.ended_s or now_s) - (entry.opened_s or entry.intended_s)),
            "" if entry.ended_s else deadline,
            f"${entry.cost(now_s):.4f}" if entry.price else "",
            f"[{_COLOURS.get(row.state, 'dim')}]{row.state}[/]",
        )
    return table


def _row_json(row: ListedSandbox) -> dict[str, Any]:
    facts = {"state": row.state, "owner_state": row.owner, "exists": row.is_live}
    return {**asdict(row.entry), **facts, "cost_usd": row.entry.cost(time.time())}


def _print_result(result: Reaped) -> None:
    entry, colour = result.entry, _COLOURS.get(result.outcome, "cyan")
    text = f"{entry.backend} {entry.name} {entry.image}: {result.reason}"
    console().print(f"[{colour}]{result.outcome}[/] {escape(text)}", soft_wrap=True)


def _span(seconds: float) -> str:
    """Return a time span in its two largest units."""
    whole = int(seconds)
    for (unit, size), (smaller, small) in pairwise(_UNITS_S):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {smaller}"
    return f"{whole} s"
