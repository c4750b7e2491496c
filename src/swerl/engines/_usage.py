"""What a client got from its engine, and when the engine had work from it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace

from swerl.core.turn import Completion

NUM_SPANS = 4096
"""Spans that are remembered: more than one training step makes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What this client got from its engine so far."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    busy_s: float = 0.0
    """Seconds during which the engine had at least one of our requests."""


@dataclass(slots=True)
class UsageMeter:
    """Counts requests as they begin and end. Times are seconds of CLOCK_MONOTONIC."""

    usage: Usage = Usage()
    spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_SPANS))
    """When at least one request was in flight."""
    _num_in_flight: int = 0
    _since: float = 0.0

    def start(self) -> None:
        """Note that a request begins."""
        if self._num_in_flight == 0:
            self._since = time.monotonic()
        self._num_in_flight += 1

    def end(self) -> None:
        """Note that a request is over, however it ended."""
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            ended = time.monotonic()
            self.spans.append((self._since, ended))
            self.usage = replace(self.usage, busy_s=self.usage.busy_s + ended - self._since)

    def count(self, completion: Completion, *, num_prompt: int) -> None:
        """Add a finished reply."""
        used = self.usage
        self.usage = replace(
            used,
            num_requests=used.num_requests + 1,
            num_prompt_tokens=used.num_prompt_tokens + num_prompt,
            num_cached_tokens=used.num_cached_tokens + completion.cached_tokens,
            num_output_tokens=used.num_output_tokens + len(completion.ids),
        )
