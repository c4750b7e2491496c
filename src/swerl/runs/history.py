"""A run's past as its events tell it; where a step was done twice, the later one counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from swerl.core.errors import RunError
from swerl.core.events import (
    EpisodeEnded,
    EvalEnded,
    Event,
    Notice,
    PhaseEnded,
    PhaseStarted,
    Progress,
    StepEnded,
    StepStarted,
    as_json,
)
from swerl.core.files import disk_errors
from swerl.runs.layout import RunFolder


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


TAIL_BYTES = 1 << 22
"""How much of the events is read back for what goes on: more than any step writes in an hour."""


@dataclass(slots=True)
class RunProgress:
    """What a run has done and is doing."""

    step: int = 0
    """Committed steps."""
    doing: str = ""
    """The last stage that began, in words."""
    phases: Counter[str] = field(default_factory=Counter)
    """Episodes in each phase."""
    episodes_done: int = 0
    episodes_expected: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the last step came to."""
    step_seconds: float = 0.0
    """Seconds of all committed steps in the part of the events that was read."""


def read_progress(root: Path) -> RunProgress:
    """Read a run folder. Raises RunError where its state is damaged."""
    folder = RunFolder(root)
    found = RunProgress(step=folder.read_state().step)
    for event in _tail(folder.events):
        _take(found, event)
    return found


def _take(found: RunProgress, event: Mapping[str, Any]) -> None:
    match event.get("event"):
        case StepStarted.__name__:
            found.doing = f"step {event['step'] + 1}"
            found.episodes_done, found.episodes_expected = 0, event["num_episodes"]
            found.phases.clear()
        case Progress.__name__:
            stage = Progress(event["stage"], event["done"], event["total"])
            found.doing = stage.in_words()
            found.episodes_done, found.episodes_expected = 0, 0
        case PhaseStarted.__name__:
            found.phases[event["phase"]] += 1
        case PhaseEnded.__name__:
            found.phases[event["phase"]] -= 1
        case EpisodeEnded.__name__:
            found.episodes_done += 1
        case StepEnded.__name__:
            found.metrics = event["metrics"]
            found.step_seconds += event["metrics"].get("step_s", 0.0)


def _tail(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the last events; a line that was cut is passed over."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        lines.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
