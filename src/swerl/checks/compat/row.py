"""Row: what came of one agent in one case, in figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from swerl.core.chat import Json
from swerl.core.sample import Sample, to_samples
from swerl.core.tree import Trajectory

NONE = "\u2013"
"""What tables show where there is nothing to show: a dash."""


class Outcome(StrEnum):
    """How a trial ended."""

    DONE = "done"
    LIMIT = "limit"
    GAVE_UP = "gave up"
    FAILED = "failed"
    """The agent or swerl did not do what the case asks."""
    CANNOT = NONE
    """The agent has no such thing, or this machine lacks what it takes."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the report counts of one trial; docs/guides/agent-compat.md defines each."""

    turns: int
    branches: int
    samples: int
    trained: float
    """Share of the sampled tokens that enter a Sample's loss, 0 to 1."""
    packed: float
    """Tokens of all Samples over the last Turn's whole context."""
    extra: int
    """Requests beyond those that the script takes."""
    outside: tuple[str, ...] | None
    """Names looked up and addresses dialled outside; None where nobody watches."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Sampled tokens that no Turn holds, by reason."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """HTTP requests of all kinds."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trial."""

    agent: str
    case: str
    family: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    figures: Figures | None = None
    log: str = ""
    """The end of the agent's transcript, where it failed."""

    def to_json(self) -> dict[str, Json]:
        """Return the row as plain values."""
        return asdict(self)


def measure(
    trajectory: Trajectory,
    requests: Mapping[str, int],
    *,
    num_needed: int,
    outside: tuple[str, ...] | None,
) -> Figures:
    """Count what a trial left."""
    samples = to_samples(trajectory, episode="lab", task="lab")
    num_sampled = trajectory.num_sampled_tokens + sum(trajectory.dropped.values())
    return Figures(
        turns=len(trajectory.turns),
        branches=sum(1 for _ in trajectory.leaves()),
        samples=len(samples),
        trained=sum(s.num_trained_tokens for s in samples) / num_sampled if num_sampled else 1.0,
        packed=_packed(trajectory, samples),
        extra=sum(requests.values()) - num_needed,
        outside=outside,
        dropped=dict(trajectory.dropped),
        requests=dict(requests),
    )


def _packed(trajectory: Trajectory, samples: list[Sample]) -> float:
    if not trajectory.turns:
        return 1.0
    path = trajectory.path(trajectory.turns[-1])
    context = sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in path)
    return sum(len(sample.ids) for sample in samples) / context
