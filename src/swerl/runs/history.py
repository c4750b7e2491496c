"""A run's past as its events tell it; where a step was done twice, the later one counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from swerl.core.errors import RunError
from swerl.core.events import EvalEnded, Event, Notice, Progress, StepEnded, StepStarted, as_json
from swerl.core.files import disk_errors


@dataclass(slots=True)
class History:
    """Metrics by step, and solve rates by evaluation."""

    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    evals: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Split -> (step, solve rate), by step."""

    def series(self, metric: str) -> list[float]:
        """Return one metric over the steps."""
        return [metrics[metric] for _, metrics in sorted(self.steps.items()) if metric in metrics]


def read(path: Path) -> History:
    """Read a run's events; a line that a crash cut short is passed over."""
    history = History()
    evals: dict[str, dict[int, float]] = {}
    for event in _lines(path):
        if event["event"] == StepEnded.__name__:
            history.steps[event["step"]] = event["metrics"]
        elif event["event"] == EvalEnded.__name__:
            evals.setdefault(event["split"], {})[event["step"]] = event["solve_rate"]
    history.evals = {split: sorted(rates.items()) for split, rates in evals.items()}
    return history


class EventLog:
    """Appends events to a file, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> EventLog:
        with disk_errors(self._path):
            self._file = self._path.open("a", encoding="utf-8")
        return self

    def __call__(self, event: Event) -> None:
        """Write an event; what `swerl train status` says of a run is flushed at once."""
        assert self._file is not None
        with disk_errors(self._path):
            self._file.write(json.dumps(as_json(event), default=str) + "\n")
            if isinstance(event, StepStarted | StepEnded | EvalEnded | Progress | Notice):
                self._file.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        try:
            with disk_errors(self._path):
                self._file.close()
        except RunError:
            if error is None:  # else it must not hide what ended the run
                raise


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
