"""The `swerl` command: registers all commands, and prints every error in two lines or less."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from swerl.cli import (
    agents,
    convert,
    cost,
    doctor,
    export,
    images,
    rollout,
    sandbox,
    serve,
    tasks,
    train,
)

HELP = "Train coding agents by reinforcement learning, from a dataset to a checkpoint."

typer_app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False)
typer_app.add_typer(train.app, name="train", help="Train by a recipe; show, stop and resume runs.")
typer_app.command("rollout")(rollout.rollout)
typer_app.command("serve")(serve.serve)
typer_app.command("convert")(convert.convert)
typer_app.command("export")(export.export)
typer_app.command("doctor")(doctor.doctor)
typer_app.add_typer(sandbox.app, name="sandbox", help="Start, check and measure sandboxes.")
typer_app.add_typer(tasks.app, name="tasks", help="Show, check and select tasks.")
typer_app.add_typer(images.app, name="images", help="Plan, fetch, check and build task images.")
typer_app.add_typer(agents.app, name="agents", help="Fetch coding agents for offline use.")
typer_app.add_typer(
    export.samples_app, name="samples", help="Show and export the rows that a run trained."
)
typer_app.add_typer(cost.app, name="cost", help="Estimate the cost of a run before it starts.")


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        from swerl.cli._output import console

        console().print(f"swerl {version('swerl')}")
        raise typer.Exit


@typer_app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Read the options before a command."""


def app() -> None:
    """Run the command line. Exit codes: 2 your input, 1 failure, 130 interrupted."""
    from swerl.core.errors import SwerlError

    try:
        typer_app()
    except SwerlError as error:
        sys.exit(_report(error))
    except ExceptionGroup as group:
        known, unknown = group.split(SwerlError)
        if unknown or known is None:
            raise
        sys.exit(_report(_first(known)))


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _report(error: BaseException) -> int:
    from rich.markup import escape

    from swerl.core.errors import InputError

    _say(f"[bold red]error:[/] {escape(str(error))}")
    if hint := getattr(error, "hint", ""):
        _say(f"[bold]hint:[/]  {escape(hint)}")
    return 2 if isinstance(error, InputError) else 1


def _say(text: str) -> None:
    from swerl.cli._output import stderr

    stderr().print(text, soft_wrap=True)
