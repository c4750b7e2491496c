"""How commands write numbers, and what others wrote."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things; the plural ends with s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def safe(text: str) -> str:
    """Return text that neither rich nor the terminal takes for a command."""
    from rich.markup import escape

    shown = text.expandtabs(4)
    return escape("".join(c if c.isprintable() else "�" for c in shown))
