"""The events of a run on disk: the log that writes them, and readers of history and progress."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
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
from swerl.core.secrets import public
from swerl.runs.layout import RunFolder

_BY_AGENT = "solve_rate/"
_NUM_ENDS = 5
"""Steps of a mean at the beginning and the end of a run."""
TAIL_BYTES = 1 << 22
"""Bytes of events that are read for the progress: more than any step writes in an hour."""


class EventLog:
    """Appends events to a file, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> EventLog:
        with disk_errors(self._path):
            self._file = self._path.open("a", encoding="utf-8")
            if not ends_a_line(self._path):
                self._file.write("\n")
        return self

    def __call__(self, event: Event) -> None:
        """Write an event; those that `swerl train status` shows are flushed at once."""
        assert self._file is not None
        with disk_errors(self._path):
            self._file.write(json.dumps(public(as_json(event)), default=str) + "\n")
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
            if error is None:  # It must not hide the error that ended the run.
                raise


def ends_a_line(path: Path) -> bool:
    """Return False if a crash has left an unfinished last line."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@dataclass(slots=True)
class RunHistory:
    """Metrics by step, and solve rates by evaluation."""

    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    evals: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Split -> (step, solve rate), by step. With several agents the key is `SPLIT/AGENT`."""
    bounds: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """Split -> step -> 95 % confidence interval of the solve rate."""

    def series(self, metric: str) -> list[float]:
        """Return one metric over the steps."""
        return [metrics[metric] for _, metrics in sorted(self.steps.items()) if metric in metrics]

    def by_agent(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Return column -> agent -> solve rate at first and last, if the run has several agents.

        The column `train` has the means over the first and the last five steps with the agent; the
        others are evaluations.
        """
        columns: dict[str, dict[str, tuple[float, float]]] = {}
        for name in sorted({name for metrics in self.steps.values() for name in metrics}):
            if name.startswith(_BY_AGENT):
                rates = self.series(name)
                ends = fmean(rates[:_NUM_ENDS]), fmean(rates[-_NUM_ENDS:])
                columns.setdefault("train", {})[name.removeprefix(_BY_AGENT)] = ends
        for name, points in self.evals.items():
            split, _, agent = name.partition("/")
            if agent:
                columns.setdefault(split, {})[agent] = (points[0][1], points[-1][1])
        return columns


def read(path: Path) -> RunHistory:
    """Read a run's events; if a step was done twice, the later one counts."""
    return HistoryReader(path).read()


class HistoryReader:
    """Reads a growing file of events; each reading costs only the bytes that are new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._history = RunHistory()

    def read(self) -> RunHistory:
        """Return the history with the lines that were written since the last call."""
        if not self._path.exists():
            return self._history
        with self._path.open("rb") as file:
            # A shorter file is another run's, or was cut.
            if self._path.stat().st_size < self._offset:
                self._offset, self._history = 0, RunHistory()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                # Most lines are of Episodes; to parse them would take minutes in a long run.
                if line.startswith(_MILESTONES):
                    self._add(line)
        return self._history

    def _add(self, line: bytes) -> None:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            event = json.loads(line)
            step = event["step"]
            if event["event"] == StepEnded.__name__:
                self._history.steps[step] = event["metrics"]
                return
            split, rate = event["split"], event["solve_rate"]
            split += f"/{event['agent']}" if event.get("agent") else ""
            earlier = [point for point in self._history.evals.get(split, ()) if point[0] != step]
            self._history.evals[split] = sorted([*earlier, (step, rate)])
            bounds = self._history.bounds.setdefault(split, {})
            bounds[step] = (event.get("low", rate), event.get("high", rate))


_MILESTONES = tuple(f'{{"event": "{event.__name__}"'.encode() for event in (StepEnded, EvalEnded))
"""Beginnings of the lines that the log writes for them."""


@dataclass(slots=True)
class RunProgress:
    step: int = 0
    """Committed steps."""
    doing: str = ""
    """The last stage that began, as text."""
    phases: Counter[str] = field(default_factory=Counter)
    """Number of Episodes in each phase."""
    episodes_done: int = 0
    episodes_expected: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step."""


def read_progress(root: Path) -> RunProgress:
    """Read a run's progress from its folder. Raises RunError on a damaged state."""
    folder = RunFolder(root)
    progress = RunProgress(step=folder.read_state().step)
    for event in read_events(folder.events, last_bytes=TAIL_BYTES):
        _add_event(progress, event)
    return progress


def _add_event(progress: RunProgress, event: Mapping[str, Any]) -> None:
    match event.get("event"):
        case StepStarted.__name__:
            progress.doing = f"step {event['step'] + 1}"
            progress.episodes_done, progress.episodes_expected = 0, event["num_episodes"]
            progress.phases.clear()
        case Progress.__name__:
            stage = Progress(event["stage"], event["done"], event["total"])
            progress.doing = stage.in_words()
            progress.episodes_done, progress.episodes_expected = 0, 0
        case PhaseStarted.__name__:
            progress.phases[event["phase"]] += 1
        case PhaseEnded.__name__:
            progress.phases[event["phase"]] -= 1
        case EpisodeEnded.__name__:
            progress.episodes_done += 1
        case StepEnded.__name__:
            progress.metrics = event["metrics"]


def read_events(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, or of its last bytes; cut lines are skipped."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        lines.seek(0 if last_bytes is None else max(0, path.stat().st_size - last_bytes))
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
