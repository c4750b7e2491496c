"""What enters and leaves the batch: requests, their jobs, and how they ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class PauseMode(StrEnum):
    """What a pause does to running requests."""

    ABORT = "abort"
    """They end with what they have."""
    IN_PLACE = "in_place"
    """They stay in their rows; the cache cannot be flushed meanwhile."""
    RETRACT = "retract"
    """They go back to the queue with the tokens sampled so far and are prefilled again."""


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to sample."""

    rid: str
    ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: tuple[int, ...] = ()
    """All ids that end the reply."""
    seed: int = 0


@dataclass(slots=True)
class Job:
    """A request and what has been sampled for it while it is in no row."""

    request: Request
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    cached_tokens: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, sampled tokens before it), oldest first."""

    def serve_under(self, version: str) -> None:
        """Note the weight version that samples from here on."""
        num_sampled = len(self.logprobs)
        if self.versions and self.versions[-1][1] == num_sampled:
            self.versions.pop()
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, num_sampled))

    def end(self, reason: str) -> Ended:
        """Close the job with what has been sampled."""
        return Ended(
            request=self.request,
            output_ids=self.ids[len(self.request.ids) :].tolist(),
            logprobs=self.logprobs.tolist(),
            reason=reason,
            cached_tokens=self.cached_tokens,
            versions=tuple(self.versions),
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished request."""

    request: Request
    output_ids: list[int]
    logprobs: list[float]
    reason: str
    """`stop`, `length` or `abort`."""
    cached_tokens: int
    versions: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Counters:
    """What the batch has done since it began."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
