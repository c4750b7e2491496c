"""Seconds per phase of an Episode, told as events while they pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from swerl.core.events import Emit, PhaseEnded, PhaseStarted


class Clock:
    """Measures the phases of one Episode; `seconds` adds up phases of the same name."""

    def __init__(self, episode: str, emit: Emit) -> None:
        self._episode = episode
        self._emit = emit
        self._started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside."""
        self._emit(PhaseStarted(self._episode, name))
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def add(self, name: str, seconds: float) -> None:
        """Take over a phase that somebody else measured and that has just ended."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._emit(PhaseEnded(self._episode, name, seconds))

    @property
    def total(self) -> float:
        """Return the seconds since the Episode began."""
        return time.monotonic() - self._started
