"""How commands write numbers."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things; the plural ends with s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
