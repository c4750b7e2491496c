"""From graded Groups to the Batch of a step, with every sampled token accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swerl.core.contracts import Algorithm
from swerl.core.episode import Group
from swerl.core.errors import TrainerError
from swerl.core.learning import Batch
from swerl.core.sample import Sample, to_samples


@dataclass(frozen=True, slots=True)
class Collected:
    """A Batch and the tokens in it."""

    batch: Batch
    num_sampled_tokens: int
    """Tokens sampled in the Episodes that say something about the policy."""

    @property
    def routed_share(self) -> float:
        """Part of the batch's positions whose experts the engine recorded.

        The trainer chooses the experts of the others itself: a row is never dropped for them.
        """
        num_positions = sum(len(sample.ids) - 1 for sample in self.batch.samples)
        num_routed = sum(sample.num_routed for sample in self.batch.samples)
        return num_routed / max(num_positions, 1)


def collect(step: int, groups: Sequence[Group], algorithm: Algorithm) -> Collected:
    """Build the Batch of a step. Raises TrainerError unless each sampled token is in it once."""
    samples: list[Sample] = []
    num_episodes = num_sampled = 0
    for group, advantages in zip(groups, algorithm.advantages(groups), strict=True):
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            if not episode.learnable:
                continue
            rows = to_samples(episode.trajectory, episode=episode.id, task=episode.task_id)
            samples += [replace(row, advantage=advantage) for row in rows]
            num_episodes += bool(rows)
            num_sampled += episode.trajectory.num_sampled_tokens
    batch = Batch(step, tuple(samples), num_episodes)
    trained = sum(sample.num_trained_tokens for sample in samples)
    if trained != num_sampled:
        raise TrainerError(
            f"step {step} sampled {num_sampled} tokens but would train {trained}",
            hint="the trajectories under episodes/ show which are missing",
        )
    return Collected(batch, num_sampled)
