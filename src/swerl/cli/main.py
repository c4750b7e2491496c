"""The `swerl` command: registers all commands, and prints every error in two lines or less."""

from __future__ import annotations

import errno
import gc
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from swerl.core.errors import SwerlError

_OF_A_NAME = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of a path that the user gave."""

COMMANDS = {
    "train": ("train.app", "Train by a recipe; show, stop and resume runs."),
    "rollout": ("rollout.rollout", "Attempt one task once, and print every turn and the verdict."),
    "eval": ("eval.app", "Score engines, checkpoints and agents; compare two scores."),
    "serve": ("serve.serve", "Serve your own agents from an engine; record the exact tokens."),
    "why": ("why.why", "Name the cause of a sick run."),
    "view": ("view.view", "Show runs and Episodes as web pages."),
    "convert": ("convert.convert", "Convert a dataset's rows to Tasks."),
    "export": ("export.export", "Write a checkpoint as a model folder in Hugging Face format."),
    "doctor": ("doctor.doctor", "Check this machine and print what to fix."),
    "sandbox": ("sandbox.app", "Start, check and measure sandboxes."),
    "tasks": ("tasks.app", "Show, check and select tasks."),
    "images": ("images.app", "Plan, fetch, check and build task images."),
    "agents": ("agents.app", "Fetch coding agents for offline use."),
    "samples": ("export.samples_app", "Show and export the rows that a run trained."),
    "cost": ("cost.app", "Estimate the cost of a run before it starts."),
    "recipes": ("found.recipes", "List the recipes that come with swerl."),
    "plugins": ("found.plugins", "List the parts that other packages add to swerl."),
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
        if not gc.isenabled():
            # What was imported stays until the end, so no collection need look at it.
            gc.freeze()
            gc.enable()
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

typer_app = typer.Typer(cls=_LazyGroup, help=HELP, no_args_is_help=True)


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
    # A pipe or a log may lack a character, which is no reason to fail.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = typer_app(standalone_mode=False)
    except Exception as error:  # the boundary: what is not one of swerl's errors is raised again
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed
            sys.exit(2)
        known = _known(error)
        if known is None:
            raise
        code = _report(known)
    sys.exit(code if isinstance(code, int) else 0)


def _known(error: BaseException) -> SwerlError | None:
    """Return the error to print, or None if it is a bug and needs its traceback."""
    from swerl.core.errors import InputError, RunError, SwerlError, missing_package

    if isinstance(error, BaseExceptionGroup):
        found = [_known(each) for each in error.exceptions]
        return None if None in found else found[0]
    if isinstance(error, SwerlError):
        return error
    if hasattr(error, "format_message"):  # Typer's, which would print a box
        command = getattr(getattr(error, "ctx", None), "command_path", "swerl")
        message = " ".join(error.format_message().split()).rstrip(".")
        return InputError(message, hint=f"{command} --help lists its arguments and options")
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error.name or "")
    if isinstance(error, OSError) and error.filename and error.errno in _OF_A_NAME:
        message = f"{error.filename}: {error.strerror}"
        return RunError(message, hint="choose a file or folder that you may use")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        # The interpreter would write the rest at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        message = f"cannot write the output: {error.strerror}"
        return RunError(message, hint="free some disk space")
    return None


def _report(error: SwerlError) -> int:
    from rich.markup import escape

    from swerl.cli._output import with_docs
    from swerl.core.errors import InputError

    _say(f"[bold red]error:[/] {escape(str(error))}")
    if error.hint:
        _say(f"[bold]hint:[/]  {escape(with_docs(error.hint))}")
    return 2 if isinstance(error, InputError) else 1


def _say(text: str) -> None:
    from swerl.cli._output import stderr

    stderr().print(text, soft_wrap=True)
