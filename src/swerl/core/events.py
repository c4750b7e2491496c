"""Typed events for progress bars, metrics and the run folder. The core never prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from swerl.core.grade import Verdict


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """An Episode entered a phase: boot (with hide_future), agent, diff, grade."""

    episode: str
    phase: str


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """An Episode left a phase after `seconds`."""

    episode: str
    phase: str
    seconds: float
    ok: bool = True
    """False if an error or the end of the command cut the phase."""


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The gateway answered one request of an Episode."""

    episode: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    said: str
    """First line of the model's reply."""
    calls: tuple[str, ...]
    """Tool calls as short `name(arguments)`."""
    results: tuple[str, ...] = ()
    """First lines of the tool results in the request."""


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An Episode ended and is on disk."""

    episode: str
    task: str
    verdict: Verdict
    reward: float
    turns: int
    tokens: int
    seconds: float
    agent: str = ""


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The rollouts of a step start; emitted again if Groups are replaced."""

    step: int
    num_episodes: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step ended; it is committed when its checkpoint is whole."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepSkipped:
    """A step was skipped: its loss or gradients are not finite; the weights are unchanged."""

    step: int
    reason: str
    batch: str
    """File of the Batch."""


@dataclass(frozen=True, slots=True)
class EvalEnded:
    """An evaluation ended."""

    step: int
    split: str
    solve_rate: float
    """pass@1: mean over Tasks of the fraction of solved attempts."""
    num_episodes: int
    """Attempts without infrastructure failures."""
    low: float = 0.0
    """Lower end of the 95 % confidence interval of `solve_rate`; `high` is the upper end."""
    high: float = 1.0
    k: int = 1
    """Attempts at each Task."""
    pass_at_k: float = 0.0
    pass_at_k_low: float = 0.0
    pass_at_k_high: float = 1.0
    num_tasks: int = 0
    num_lost: int = 0
    """Attempts lost to infrastructure failures."""
    agent: str = ""
    """Name of the agent in a run with several."""

    @property
    def name(self) -> str:
        """The split, with the agent if there are several."""
        return f"{self.split}/{self.agent}" if self.agent else self.split


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a stage other than rollouts: warm start, building, starting."""

    stage: str
    done: int
    total: int
    """1 for a stage without countable parts."""
    note: str = ""

    def in_words(self) -> str:
        """Return the stage and its progress as text."""
        how_far = f" {self.done}/{self.total}" if self.total > 1 else ""
        return f"{self.stage}{how_far} {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class Notice:
    """A message for the user; the run continues."""

    text: str


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """Load of the gateway since the last such event."""

    lag_s: float
    """Maximum event-loop lag in seconds."""
    sessions: int


Event: TypeAlias = (
    PhaseStarted
    | PhaseEnded
    | TurnEnded
    | EpisodeEnded
    | StepStarted
    | StepEnded
    | StepSkipped
    | EvalEnded
    | Progress
    | Notice
    | GatewayLoad
)
Emit: TypeAlias = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Drop an event."""


def fan_out(*listeners: Emit) -> Emit:
    """Return a function that passes every event to each listener in order."""

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


def as_json(event: Event) -> dict[str, Any]:
    """Return the event as one line of `events.jsonl`: name, time and fields."""
    return {"event": type(event).__name__, "time": round(time.time(), 3), **asdict(event)}
