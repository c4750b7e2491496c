"""The consoles that commands print to."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_WIDTH = 120
"""Columns where no terminal says how many there are: names in tables stay whole in logs."""


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
