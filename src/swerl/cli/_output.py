"""The consoles of all commands, and formatting of numbers and untrusted text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Set
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import typer

from swerl.core.files import shipped_folder

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPED_WIDTH = 10_000
"""Columns without a terminal: nothing is wrapped in a file or another program's input."""


_IS_JSON = ContextVar("_IS_JSON", default=False)


def console() -> Console:
    """Return the console for results: stderr under `--json`, which has stdout to itself."""
    return stderr() if _IS_JSON.get() else stdout()


def keep_stdout_for_json(as_json: bool) -> bool:
    """Send the text of this command to stderr if it prints JSON; return the argument."""
    _IS_JSON.set(as_json)
    return as_json


@cache
def stdout() -> Console:
    return _console()


@cache
def stderr() -> Console:
    """Return the console for errors and progress."""
    return _console(stderr=True)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    out = Console(stderr=stderr, highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _PIPED_WIDTH
    return out


def print_json(value: object) -> None:
    """Print a value as JSON: dataclasses as objects, errors as text with their hint."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, default=_plain))


def _plain(value: Any) -> object:
    from swerl.core.errors import SwerlError

    if isinstance(value, SwerlError):
        return value.explained()
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(value) if isinstance(value, Set) else str(value)


def with_docs(text: str) -> str:
    """Return the text with each page of the docs as a path on this machine."""
    folder = shipped_folder("docs").parent
    return re.sub(r"\bdocs/[\w/-]+\.md", lambda match: str(folder / match[0]), text)


def simple_table(
    *titles: str, whole: Collection[str] = (), numbers: Collection[str] = (), **settings: Any
) -> Table:
    """Return a table with these columns; `whole` ones are never wrapped."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(**{"box": SIMPLE, "pad_edge": False, "title_justify": "left", **settings})
    for title in titles:
        justify: Any = "right" if title in numbers else "left"
        table.add_column(title, justify=justify, no_wrap=title in whole, overflow="fold")
    return table


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun; the plural adds an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def safe(text: str) -> str:
    """Return text without control sequences of rich or the terminal."""
    from rich.markup import escape

    shown = text.expandtabs(4)
    return escape("".join(c if c.isprintable() else "�" for c in shown))
