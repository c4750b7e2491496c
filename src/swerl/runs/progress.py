"""How far a run is and what it does, as its folder tells."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swerl.core.events import EpisodeEnded, PhaseEnded, PhaseStarted, StepEnded, StepStarted
from swerl.core.events import Progress as ProgressEvent
from swerl.runs.layout import RunFolder

TAIL_BYTES = 1 << 22
"""How much of the events is read back for what goes on: more than any step writes in an hour."""


@dataclass(slots=True)
class Progress:
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


def read_progress(root: Path) -> Progress:
    """Read a run folder. Raises RunError where its state is damaged."""
    folder = RunFolder(root)
    found = Progress(step=folder.read_state().step)
    for event in _tail(folder.events):
        _take(found, event)
    return found


def _take(found: Progress, event: Mapping[str, Any]) -> None:
    match event.get("event"):
        case StepStarted.__name__:
            found.doing = f"step {event['step'] + 1}"
            found.episodes_done, found.episodes_expected = 0, event["num_episodes"]
            found.phases.clear()
        case ProgressEvent.__name__:
            stage = ProgressEvent(event["stage"], event["done"], event["total"])
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
