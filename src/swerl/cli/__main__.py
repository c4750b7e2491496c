"""`python -m swerl.cli`: the `swerl` command."""

from swerl.cli.main import app

app()
