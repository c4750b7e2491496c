"""`swerl sandbox`: one file for each of its commands; this one registers them."""

from __future__ import annotations

import typer

from swerl.cli import sandbox_ledger, sandbox_probe, sandbox_serve, sandbox_smoke

app = typer.Typer(no_args_is_help=True, help="Start, check and measure sandboxes.")

app.command("serve")(sandbox_serve.serve)
app.command("probe")(sandbox_probe.probe)
app.command("smoke")(sandbox_smoke.smoke)
app.command("ps")(sandbox_ledger.ps)
app.command("reap")(sandbox_ledger.reap)
app.command("bill")(sandbox_ledger.bill)


@app.callback()
def _sandbox() -> None:
    """Start, check and measure sandboxes."""
