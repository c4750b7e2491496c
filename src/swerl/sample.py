"""Sample: one root-to-leaf token row, what the trainer eats; every sampled token in exactly one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swerl.tree import Trajectory
from swerl.turn import Turn


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row of length T.

    `mask[t]` is 1 where token t was sampled and is trained here; everywhere else the token is
    context. The prefix `ids[:t]` of a trained token is exactly what the engine saw.
    """

    episode: str
    task: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability under the policy that sampled it; 0.0 on context."""
    weight_versions: tuple[str, ...] = ()
    """Weight versions of the trained Turns, oldest first, without repeats."""
    advantage: float = 0.0
    share: float = 1.0
    """Trained tokens of this Sample over those of its whole Episode: its part of one vote."""

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that enter the loss."""
        return sum(self.mask)


def to_samples(trajectory: Trajectory, *, episode: str, task: str) -> list[Sample]:
    """Linearise a Trajectory: one Sample a leaf; a shared Turn is trained with its first leaf.

    Turns without token ids (`trainable` false) are left out. The shares of the result sum to one.
    """
    trained: set[int] = set()
    rows: list[tuple[Sample, int]] = []
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        if not all(turn.trainable for turn in path):
            continue
        fresh = {turn.index for turn in path} - trained
        trained |= fresh
        num_trained = sum(len(turn.output_ids) for turn in path if turn.index in fresh)
        if num_trained:
            rows.append((_row(path, fresh, episode, task), num_trained))
    total = sum(num_trained for _, num_trained in rows)
    return [replace(sample, share=num_trained / total) for sample, num_trained in rows]


def _row(path: tuple[Turn, ...], fresh: set[int], episode: str, task: str) -> Sample:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: dict[str, None] = {}
    for turn in path:
        is_fresh = turn.index in fresh
        ids += turn.prompt_ids + turn.output_ids
        mask += [0] * len(turn.prompt_ids) + [int(is_fresh)] * len(turn.output_ids)
        logprobs += [0.0] * len(turn.prompt_ids)
        logprobs += turn.logprobs if is_fresh else [0.0] * len(turn.output_ids)
        if is_fresh:
            versions[turn.weight_version] = None
            versions |= dict.fromkeys(change.version for change in turn.weight_changes)
    return Sample(
        episode=episode,
        task=task,
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        weight_versions=tuple(versions),
    )
