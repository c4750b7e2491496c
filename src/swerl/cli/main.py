"""The `swerl` command: registers all commands, and prints every error in two lines or less."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "train": ("train.app", "Train by a recipe; show, stop and resume runs."),
    "rollout": ("rollout.rollout", "Attempt one task once, and print every turn and the verdict."),
    "serve": ("serve.serve", "Serve your own agents from an engine; record the exact tokens."),
    "convert": ("convert.convert", "Convert a dataset's rows to Tasks."),
    "export": ("export.export", "Write a checkpoint as a model folder in Hugging Face format."),
    "doctor": ("doctor.doctor", "Check this machine and print what to fix."),
    "sandbox": ("sandbox.app", "Start, check and measure sandboxes."),
    "tasks": ("tasks.app", "Show, check and select tasks."),
    "images": ("images.app", "Plan, fetch, check and build task images."),
    "agents": ("agents.app", "Fetch coding agents for offline use."),
    "samples": ("export.samples_app", "Show and export the rows that a run trained."),
    "cost": ("cost.app", "Estimate the cost of a run before it starts."),
}
"""Name -> its function or Typer app in a module of `swerl.cli`, and its line in the help."""


class _LazyGroup(TyperGroup):
    """Imports a command when it runs: `swerl --help` imports none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, text) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=text)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the arguments name."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = _command(args[0])
        return super().resolve_command(ctx, args)


def _command(name: str) -> Any:
    module, attribute = COMMANDS[name][0].split(".")
    found = getattr(import_module(f"swerl.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
    else:
        single = typer.Typer(add_completion=False)
        single.command(name)(found)
        command = typer.main.get_command(single)
    command.name = name
    return command


def whole_command() -> Any:
    """Return the `swerl` command with every command imported, for the reference pages."""
    group: Any = typer.main.get_command(typer_app)
    group.commands |= {name: _command(name) for name in COMMANDS}
    return group


HELP = "Train coding agents by reinforcement learning, from a dataset to a checkpoint."

typer_app = typer.Typer(cls=_LazyGroup, help=HELP, no_args_is_help=True, add_completion=False)


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
