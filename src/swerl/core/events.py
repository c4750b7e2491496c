"""Typed events: what the core tells to progress bars, metrics and the run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from swerl.core.grade import Verdict


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """An Episode entered a phase: boot, scrub (a part of boot), agent, diff, grade."""

    episode: str
    phase: str


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """An Episode left a phase after `seconds`."""

    episode: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The gateway answered one request of an Episode."""

    episode: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    said: str
    """First line of what the model said."""
    calls: tuple[str, ...]
    """Tool calls, as `name(arguments)` in short."""
    results: tuple[str, ...] = ()
    """First lines of the tool results that the request brought."""


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """An Episode is over and written."""

    episode: str
    task: str
    verdict: Verdict
    reward: float
    turns: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepStarted:
    """The run begins the rollouts of a step; again where Groups are replaced by others."""

    step: int
    num_episodes: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step is over; it is committed once its checkpoint is whole."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepSkipped:
    """A step was not taken: its loss or gradients are not finite; the weights are unchanged."""

    step: int
    reason: str
    batch: str
    """File of the Batch."""


@dataclass(frozen=True, slots=True)
class EvalEnded:
    """An evaluation is over."""

    step: int
    split: str
    solve_rate: float
    """pass@1: the mean over Tasks of the share of attempts that solved it."""
    num_episodes: int
    """Attempts that count: those that machinery lost do not."""
    low: float = 0.0
    """Ends of the 95 % confidence interval of `solve_rate`."""
    high: float = 1.0
    k: int = 1
    """Attempts at each Task."""
    pass_at_k: float = 0.0
    pass_at_k_low: float = 0.0
    pass_at_k_high: float = 1.0
    num_tasks: int = 0
    num_lost: int = 0
    """Attempts lost to machinery."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage other than rollouts moved on: warm start, building, starting."""

    stage: str
    done: int
    total: int
    """1 for a stage without parts that could be counted."""
    note: str = ""

    def in_words(self) -> str:
        """Return the stage and how far it is."""
        how_far = f" {self.done}/{self.total}" if self.total > 1 else ""
        return f"{self.stage}{how_far} {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a person should know and that stops nothing."""

    text: str


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """How busy one process of the gateway was since it last said so."""

    process: int
    lag_s: float
    """The longest for which its event loop answered nobody."""
    at_work: int
    """Requests at work, waiting ones not counted."""
    waiting: int
    refused: int
    """Requests that found no place in that time, and were told to ask again."""
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
    """Take an event and do nothing with it."""


def fan_out(*listeners: Emit) -> Emit:
    """Return a function that hands every event to each listener in turn."""

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


def as_json(event: Event) -> dict[str, Any]:
    """Return the event as one line of `events.jsonl`: its name, the time and its fields."""
    return {"event": type(event).__name__, "time": round(time.time(), 3), **asdict(event)}
