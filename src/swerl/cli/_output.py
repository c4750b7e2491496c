"""The consoles of all commands, and formatting of numbers and untrusted text."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 120
"""Columns without a terminal: names in tables stay whole in logs."""


@cache
def console() -> Console:
    """Return the console for results."""
    from rich.console import Console

    out = Console(highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = _PIPED_WIDTH
    return out


@cache
def stderr() -> Console:
    """Return the console for errors and progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun; the plural adds an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def safe(text: str) -> str:
    """Return text without control sequences of rich or the terminal."""
    from rich.markup import escape

    shown = text.expandtabs(4)
    return escape("".join(c if c.isprintable() else "�" for c in shown))
