"""The consoles that commands print to."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@cache
def console() -> Console:
    """Return the console for results."""
    from rich.console import Console

    return Console(highlight=False)


@cache
def stderr() -> Console:
    """Return the console for errors and progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)
