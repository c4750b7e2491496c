"""Where the wall time of a step went, measured while it passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from swerl.core.events import Event, GatewayLoad, PhaseEnded
from swerl.training.walltime import Span, covered


@runtime_checkable
class KeepsBusySpans(Protocol):
    """An engine that accounts for its own time."""

    async def busy_spans(self) -> Sequence[Span]:
        """Return when it computed, in seconds of CLOCK_MONOTONIC."""


class Meter:
    """Collects spans of one step: model (the engine computes), trainer and tests.

    Also the longest stall of the gateway, and the requests that it was too busy for.
    """

    def __init__(self, engine: object) -> None:
        self._engine = engine
        self._started = time.monotonic()
        self._spans: dict[str, list[Span]] = {}
        self._loads: list[GatewayLoad] = []

    def __call__(self, event: Event) -> None:
        """Take the test spans and the gateway's load out of the stream of events."""
        if isinstance(event, GatewayLoad):
            self._loads.append(event)
        if isinstance(event, PhaseEnded) and event.phase == "test":
            now = time.monotonic()
            self._spans.setdefault("test", []).append((now - event.seconds, now))

    def start(self) -> None:
        """Begin a step."""
        self._spans.clear()
        self._loads.clear()
        self._started = time.monotonic()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure a part of the step."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((started, time.monotonic()))

    async def stop(self) -> dict[str, float]:
        """End the step; return its seconds, by part, and the share that no part explains."""
        window = (self._started, time.monotonic())
        if isinstance(self._engine, KeepsBusySpans):
            self._spans["model"] = list(await self._engine.busy_spans())
        seconds = window[1] - window[0]
        work = [span for name in ("model", "train", "test") for span in self._spans.get(name, ())]
        parts = {f"{name}_s": covered(spans, window) for name, spans in self._spans.items()}
        return {
            "step_s": seconds,
            **parts,
            "other_share": 1 - covered(work, window) / seconds,
            "gateway_lag_s": max((load.lag_s for load in self._loads), default=0.0),
            "gateway_refused": sum(load.refused for load in self._loads),
        }
