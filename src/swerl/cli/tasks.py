"""`swerl tasks`: register its commands; each has its own file."""

from __future__ import annotations

import typer

from swerl.cli import convert, tasks_redteam, tasks_scan_leaks, tasks_select, tasks_vet
from swerl.cli.eval import solve_rate

app = typer.Typer(no_args_is_help=True, help="Show, check and select the tasks of a file.")

app.command("show")(tasks_select.show)
app.command("stats")(tasks_select.stats)
app.command("export")(convert.export)
app.command("filter")(tasks_select.filter_tasks)
app.command("sample")(tasks_select.sample)
app.command("split")(tasks_select.split)
app.command("vet")(tasks_vet.vet)
app.command("solve-rate")(solve_rate)
app.command("scan-leaks")(tasks_scan_leaks.scan_leaks)
app.command("redteam")(tasks_redteam.redteam)
