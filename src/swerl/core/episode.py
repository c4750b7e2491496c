"""Episode: one attempt at one Task; Group: the attempts that are compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swerl.core.grade import LEARNABLE, Grade, Verdict
from swerl.core.tree import Trajectory


class Status(StrEnum):
    """How the harness of an Episode ended."""

    COMPLETED = "completed"
    """The harness ended by itself."""
    LIMIT = "limit"
    """A turn or token limit stopped it; the patch so far is graded."""
    TIMEOUT = "timeout"
    """A time budget stopped it."""
    FAILED = "failed"
    """The harness or what carries it broke."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished attempt with everything that it left."""

    id: str
    task_id: str
    status: Status
    grade: Grade
    reward: float
    """Number computed from grade and status by a named rule; meaningless unless `learnable`."""
    trajectory: Trajectory
    patch: str = ""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds per phase: boot, install, agent, diff, grade_boot, test, …"""
    log: str = ""
    """What the harness printed."""
    records: bytes = b""
    """What the agent wrote down of its session in files of its own, where it does; JSON lines."""
    error: str = ""
    """One line on what broke, where something did."""
    lost_tokens: int = 0
    """Tokens sampled in attempts before this one, which machinery lost."""

    @property
    def verdict(self) -> Verdict:
        """The Verdict of its grade."""
        return self.grade.verdict

    @property
    def learnable(self) -> bool:
        """Whether the Episode says something about the policy."""
        return self.grade.verdict in LEARNABLE


@dataclass(frozen=True, slots=True)
class Group:
    """The Episodes of one Task in one step."""

    task_id: str
    episodes: tuple[Episode, ...]

    @property
    def has_signal(self) -> bool:
        """Whether learnable Episodes have different rewards: there is something to compare."""
        return len({episode.reward for episode in self.episodes if episode.learnable}) > 1
