"""Turn: one request and reply of a Session in exact tokens; Completion: an engine's raw answer."""

from __future__ import annotations

from dataclasses import dataclass

from swerl.chat import Finish


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples one reply."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Seed of this reply's draws; None leaves it to the engine."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled."""

    ids: tuple[int, ...]
    """Sampled token ids, the stop token included where the model sampled it."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token at temperature and weights it was sampled with."""
    finish: Finish
    weight_version: str
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            message = f"{len(self.ids)} sampled ids but {len(self.logprobs)} log-probabilities"
            raise ValueError(message)


@dataclass(frozen=True, slots=True)
class Turn:
    """One node of a Trajectory.

    The engine's whole prompt was the tokens of the path from the root to `parent`, then
    `prompt_ids`; it answered with `output_ids`.
    """

    index: int
    parent: int | None
    """Index of the Turn that this one continues; None for a root."""
    prompt_ids: tuple[int, ...]
    """Tokens added after the parent's output: what the client said since."""
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    weight_version: str
    started_s: float = 0.0
    """Seconds since the Session opened."""
    duration_s: float = 0.0
    trainable: bool = True
    """False where the engine gave no token ids (a debugging engine)."""
    malformed_calls: int = 0
