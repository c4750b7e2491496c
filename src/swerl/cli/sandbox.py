"""`swerl sandbox`: register its commands; each has its own file."""

from __future__ import annotations

import typer

from swerl.cli import sandbox_attacks, sandbox_ledger, sandbox_serve, sandbox_smoke

app = typer.Typer(no_args_is_help=True, help="Start, check and measure sandboxes.")

app.command("serve")(sandbox_serve.serve)
app.command("attacks")(sandbox_attacks.attacks)
app.command("smoke")(sandbox_smoke.smoke)
app.command("ps")(sandbox_ledger.ps)
app.command("reap")(sandbox_ledger.reap)
app.command("bill")(sandbox_ledger.bill)
