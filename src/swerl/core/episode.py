"""Episode: one attempt at one Task; Group: the attempts that are compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swerl.core.grade import LEARNABLE, Grade, Verdict
from swerl.core.turn import Trajectory

REFILLS = 2
"""Retries of an Episode that was lost to an infrastructure failure: the third loss in a row points
at the infrastructure and not at chance."""


class Status(StrEnum):
    """How the harness of an Episode ended."""

    COMPLETED = "completed"
    """The harness ended by itself."""
    LIMIT = "limit"
    """A turn or token limit stopped it; the patch so far is graded."""
    TIMEOUT = "timeout"
    """A time budget stopped it."""
    FAILED = "failed"
    """The harness or its infrastructure failed."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished attempt with all its results."""

    id: str
    task_id: str
    status: Status
    grade: Grade
    reward: float
    """Number from grade and status by a named rule; meaningless unless `learnable`."""
    trajectory: Trajectory
    patch: str = ""
    """The agent's changes, as a diff against the clean work tree."""
    num_left: int = 0
    """Changed files that the patch leaves out: derived ones, large ignored ones, devices."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds per phase: boot, install, agent, diff, grade_boot, test, …"""
    log: str = ""
    """Output of the harness."""
    records: bytes = b""
    """The agent's own session files as JSON lines; empty if it writes none."""
    error: str = ""
    """One line about a failure; empty if there was none."""
    lost_tokens: int = 0
    """Tokens sampled in earlier attempts that infrastructure failures lost."""
    agent: str = ""
    """Name of the agent."""

    @property
    def verdict(self) -> Verdict:
        return self.grade.verdict

    @property
    def fault(self) -> str:
        """Failure of the user's own reward, agent or grader, which ends the run; else empty."""
        return self.error if self.verdict is Verdict.INVALID else ""

    @property
    def learnable(self) -> bool:
        """True if the Episode is a result of the policy."""
        return self.grade.verdict in LEARNABLE


@dataclass(frozen=True, slots=True)
class Group:
    """The Episodes of one Task and one agent in one step."""

    task_id: str
    episodes: tuple[Episode, ...]
    agent: str = ""
    """Name of its agent in the training of several; else empty."""

    @property
    def has_signal(self) -> bool:
        """True if its learnable Episodes have different rewards."""
        return len({episode.reward for episode in self.episodes if episode.learnable}) > 1
