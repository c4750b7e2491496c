"""Where the wall time went: spans of model, trainer and tests, and what none of them covers."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Start and end in seconds of one clock."""


def covered(spans: Iterable[Span], window: Span) -> float:
    """Return the seconds of `window` during which at least one span is open."""
    start, end = window
    total, reached = 0.0, start
    for left, right in sorted(spans):
        left, right = max(left, reached), min(right, end)
        if right > left:
            total += right - left
            reached = right
    return total
