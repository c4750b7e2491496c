"""The tokens of a Turn, with the log-probabilities of the engine and of the trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swerl.core.contracts import Family
from swerl.core.errors import RunError
from swerl.core.sample import trained_turns
from swerl.core.turn import Trajectory, Turn
from swerl.runs.layout import RunFolder
from swerl.runs.prompts import GroupEntry
from swerl.runs.tables import read_logprobs

FAR = 0.5
"""Nats between engine and trainer from which a token is framed: a factor of 1.6."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a Turn."""

    place: int
    """Position in the whole row."""
    id: int
    text: str
    is_sampled: bool
    logprob: float | None = None
    """By the engine that sampled it."""
    trainer: float | None = None
    """By the trainer before its step; None if it was not trained."""
    version: str = ""

    @property
    def level(self) -> int:
        """Probability in five levels: 0 for a surprise, 4 for a certainty."""
        logprob = self.logprob if self.logprob is not None else 0.0
        return min(int(math.exp(min(logprob, 0.0)) * 5), 4) if math.isfinite(logprob) else 0

    @property
    def gap(self) -> float | None:
        """Log-probability of the trainer minus that of the engine."""
        if self.trainer is None or self.logprob is None:
            return None
        return self.trainer - self.logprob

    @property
    def is_far(self) -> bool:
        """True if engine and trainer differ much, or one of them is not finite."""
        return self.gap is not None and not abs(self.gap) < FAR


def strip(
    turn: Turn, family: Family | None, before: int, trainer: Sequence[float] = ()
) -> list[Token]:
    """Return the tokens that a Turn added to its branch, which has `before` earlier ones."""
    texts: dict[int, str] = {}

    def text(id: int) -> str:
        if id not in texts:
            texts[id] = family.text([id]) if family else f"{id} "
        return texts[id]

    strip_tokens = [Token(before + n, id, text(id), False) for n, id in enumerate(turn.prompt_ids)]
    start, version = before + len(turn.prompt_ids), turn.weight_version
    changes = {change.at: change.version for change in turn.weight_changes}
    for n, (id, logprob) in enumerate(zip(turn.output_ids, turn.logprobs, strict=False)):
        version = changes.get(n, version)
        other = trainer[n] if n < len(trainer) else None
        strip_tokens.append(Token(start + n, id, text(id), True, logprob, other, version))
    return strip_tokens


def trainer_logprobs(
    run: RunFolder, entry: GroupEntry | None, episode: str, trajectory: Trajectory
) -> dict[int, Sequence[float]]:
    """Return Turn -> the trainer's log-probabilities of its tokens; nothing without a record.

    `entry` names the step that trained the Episode. Raises RunError on a damaged file.
    """
    if entry is None or not (path := run.logprobs(entry.step)).exists():
        return {}
    if not (rows := read_logprobs(path, episode)):
        return {}
    trained = trained_turns(trajectory)
    sizes = [sum(len(turn.output_ids) for turn in turns) for turns in trained]
    if [len(row) for row in rows] != sizes:
        raise RunError(
            f"the log-probabilities in {path} do not match {episode}",
            hint="they belong to another attempt",
        )
    logprobs: dict[int, Sequence[float]] = {}
    for row, turns in zip(rows, trained, strict=True):
        start = 0
        for turn in turns:
            logprobs[turn.index] = row[start : start + len(turn.output_ids)]
            start += len(turn.output_ids)
    return logprobs
