"""The `swerl` command: registers all commands, and prints every error in two lines or less."""

from __future__ import annotations

import ast
import errno
import gc
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from swerl.core.errors import SwerlError

_OF_A_NAME = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of a path that the user gave."""

COMMANDS: dict[str, tuple[str | dict[str, str], str]] = {
    "train": (
        {
            "status": "train_status.status",
            "run": "train.train",
            "resume": "train.resume",
            "stop": "train.stop",
            "rewind": "train.rewind",
        },
        "Train by a recipe; show, stop and resume runs.",
    ),
    "rollout": (
        "rollout.rollout",
        "Attempt one task once, and print every turn and the verdict.",
    ),
    "eval": (
        {"run": "eval.evaluate", "compare": "eval.compare"},
        "Score engines, checkpoints and agents; compare two scores.",
    ),
    "serve": ("serve.serve", "Serve your own agents from an engine; record the exact tokens."),
    "why": ("why.why", "Name the cause of a sick run."),
    "reward": ("reward.reward", "Try a reward on recorded Episodes, without sampling."),
    "view": ("view.view", "Show runs and Episodes as web pages."),
    "convert": ("convert.convert", "Convert a dataset's rows to Tasks."),
    "export": (
        "export.export",
        "Write a checkpoint as a model folder, or trained rows.",
    ),
    "doctor": (
        "doctor.doctor",
        "Check this machine or the launch of a recipe; print what to fix.",
    ),
    "sandbox": (
        {
            "serve": "sandbox_serve.serve",
            "smoke": "sandbox_smoke.smoke",
            "ps": "sandbox_ledger.ps",
            "reap": "sandbox_ledger.reap",
        },
        "Start, check and measure sandboxes.",
    ),
    "tasks": (
        {
            "show": "tasks_select.show",
            "filter": "tasks_select.filter_tasks",
            "from-repo": "tasks_from_repo.from_repo",
            "vet": "tasks_vet.vet",
            "solve-rate": "eval.solve_rate",
        },
        "Show, check and select the tasks of a file.",
    ),
    "images": (
        {
            "build": "images.build",
            "bake": "images.bake",
            "pull": "images.pull",
            "prepare": "images.prepare",
            "ls": "images.ls",
            "gc": "images.gc",
            "mirror": "images.mirror_images",
        },
        "Plan, fetch, check and build task images.",
    ),
    "agents": (
        {"fetch": "agents.fetch"},
        "Fetch agent CLIs.",
    ),
    "cost": (
        {"estimate": "cost.estimate_cost"},
        "Estimate the speed and cost of a run before it starts.",
    ),
    "recipes": ("recipes.recipes", "List the recipes that come with swerl."),
}
"""Name -> its function in a module of `swerl.cli`, or its commands; its line in the help."""
EXAMPLES = {
    "train": ("  swerl train twin_cpu", "  swerl train mine.toml --set trainer.lr=1e-4 --dry-run"),
    "eval": (
        "  swerl eval tasks.jsonl --engine sglang=http://127.0.0.1:30000",
        "  swerl eval compare runs/a@10 runs/a@40",
    ),
}
"""Group with a default command -> two command lines for the top of its help."""
_RUN = "run"
"""The default command of a group: `swerl train RECIPE`, `swerl eval TASKS`."""


class _LazyGroup(TyperGroup):
    """Imports a command when it runs: `swerl --help` imports none."""

    parts: Mapping[str, Any] = COMMANDS

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the main form of a group, if it has one, then a line for each command."""
        if _RUN in self.parts:
            main_form = _command(_RUN, self.parts[_RUN])
            typer.echo("\n".join(f" {line}" for line in ("Examples:", *EXAMPLES[self.name or ""])))
            inner = ctx.__class__(main_form, info_name=ctx.info_name, parent=ctx.parent)
            main_form.format_help(inner, formatter)
        for name, part in self.parts.items():
            text = _first_line(part) if isinstance(part, str) else part[1]
            self.commands[name] = TyperCommand(name, help=text)
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command, if there is one, before an argument that is no command."""
        self.commands.update({name: TyperCommand(name) for name in self.parts})
        if _RUN in self.parts and args and args[0] not in (*self.parts, "--help", "-h"):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the arguments name."""
        if args and args[0] in self.parts:
            self.commands[args[0]] = _command(args[0], self.parts[args[0]])
        command = super().resolve_command(ctx, args)
        if not (gc.isenabled() or isinstance(command[1], TyperGroup)):
            # What was imported stays until the end, so no collection need look at it.
            gc.freeze()
            gc.enable()
        return command


def _first_line(target: str) -> str:
    """Return the first line of a function's docstring without importing its module."""
    module, function = target.split(".")
    source = Path(__file__).with_name(f"{module}.py").read_text("utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def _command(name: str, part: Any) -> Any:
    """Import a command, or make the group of some; `part` is its entry in the table."""
    target = part if isinstance(part, str) else part[0]
    if isinstance(target, str):
        module, function = target.split(".")
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(getattr(import_module(f"swerl.cli.{module}"), function))
        command: Any = typer.main.get_command(single)
    else:
        app = _group(part[1])
        command = typer.main.get_group(app)
        command.parts = target
    command.name = name
    return command


def whole_command() -> Any:
    """Return the `swerl` command with every command imported, for the reference pages."""

    def load(group: Any) -> Any:
        group.commands |= {name: _command(name, part) for name, part in group.parts.items()}
        for command in group.commands.values():
            if isinstance(command, _LazyGroup):
                load(command)
        return group

    return load(typer.main.get_command(typer_app))


HELP = "Train coding agents by reinforcement learning, from a dataset to a checkpoint."


def _group(text: str) -> typer.Typer:
    """Return a group whose help is plain text: importing rich takes longer than all the rest."""
    return typer.Typer(cls=_LazyGroup, help=text, no_args_is_help=True, rich_markup_mode=None)


typer_app = _group(HELP)


def _version(show: bool) -> None:
    if show:
        from swerl import __version__
        from swerl.cli._output import console

        console().print(f"swerl {__version__}")
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
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(str(getattr(error, "message", "")), err=True)
            sys.exit(2)
        reported = _known(error)
        if reported is None:
            raise
        code = _report(reported)
    sys.exit(code if isinstance(code, int) else 0)


def _known(error: BaseException) -> SwerlError | None:
    """Return the error to print, or None if it is a bug and needs its traceback."""
    from swerl.core.errors import InputError, RunError, SwerlError, missing_package

    if isinstance(error, BaseExceptionGroup):
        errors = [_known(part) for part in error.exceptions]
        return None if None in errors else errors[0]
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
