"""Build a step's Batch from graded Groups, and keep it as a Parquet file that the ranks read.

docs/reference/samples.md lists the file's columns. The weights of a file sum to 1. Its metadata
holds the step and the number of Episodes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from swerl.core import experts, plugins
from swerl.core.contracts import Algorithm
from swerl.core.episode import Group, Status
from swerl.core.errors import RunError, TrainerError
from swerl.core.files import disk_errors, write_bytes
from swerl.core.grade import Grade, Verdict
from swerl.core.learning import Batch
from swerl.core.sample import Sample, to_samples
from swerl.runs import tables

TRUNCATED = frozenset({Status.LIMIT, Status.TIMEOUT})
"""How an Episode ends that a limit of turns, tokens or time stopped."""


@dataclass(frozen=True, slots=True)
class CollectedBatch:
    batch: Batch
    num_sampled_tokens: int
    """Tokens sampled in the Episodes that are trained."""
    lost: tuple[str, ...] = ()
    """Episodes with sampled tokens whose ids are unknown, so that they cannot be trained."""
    num_masked: int = 0
    """Episodes that `rollout.truncated = "mask"` left out."""

    @property
    def routed_share(self) -> float:
        """Share of the batch's positions whose experts the engine recorded.

        The trainer's own router chooses for the others: a missing record drops no row.
        """
        num_positions = sum(len(sample.ids) - 1 for sample in self.batch.samples)
        num_routed = sum(sample.num_routed for sample in self.batch.samples)
        return num_routed / max(num_positions, 1)


def collect(
    step: int, groups: Sequence[Group], algorithm: Algorithm, *, mask_truncated: bool = False
) -> CollectedBatch:
    """Build the Batch of a step, which trains each sampled token of its Episodes once.

    An Episode of which it cannot is excluded from every mean, as if infrastructure had lost it.
    With `mask_truncated` an Episode that a limit stopped counts in its Group's mean, but is not
    trained (DAPO, arXiv 2503.14476, section 3.4).
    """
    rows_by_episode: dict[str, list[Sample]] = {}
    lost: list[str] = []
    for episode in (episode for group in groups for episode in group.episodes if episode.learnable):
        rows = to_samples(episode.trajectory, episode=episode.id, task=episode.task_id)
        num_trained = sum(row.num_trained_tokens for row in rows)
        if num_trained == episode.trajectory.num_sampled_tokens:
            rows_by_episode[episode.id] = rows
        else:
            lost.append(episode.id)
    groups = [_without(group, lost) for group in groups]
    samples: list[Sample] = []
    num_episodes = num_masked = 0
    for group, advantages in zip(groups, advantages_of(groups, algorithm), strict=True):
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            rows = rows_by_episode.get(episode.id, [])
            if rows and mask_truncated and episode.status in TRUNCATED:
                num_masked += 1
                continue
            samples += [replace(row, advantage=advantage, agent=episode.agent) for row in rows]
            # An Episode without a sampled token has no row and no vote.
            num_episodes += bool(rows)
    batch = Batch(step, tuple(samples), num_episodes)
    return CollectedBatch(batch, batch.totals.num_tokens, tuple(lost), num_masked)


def _without(group: Group, lost: Collection[str]) -> Group:
    """Return a Group whose lost Episodes have the verdict of an infrastructure failure."""
    grade = Grade(Verdict.INFRA, reason="sampled tokens without ids")
    episodes = (
        replace(episode, grade=grade) if episode.id in lost else episode
        for episode in group.episodes
    )
    return replace(group, episodes=tuple(episodes))


def advantages_of(groups: Sequence[Group], algorithm: Algorithm) -> list[Sequence[float]]:
    """Return each Episode's advantage; no mean and no deviation mixes agents.

    A Group has one agent. An algorithm that scales over the step scales over an agent's Groups.
    """
    advantages: dict[int, Sequence[float]] = {}
    for agent in dict.fromkeys(group.agent for group in groups):
        numbers = [number for number, group in enumerate(groups) if group.agent == agent]
        with plugins.blaming("algorithms", algorithm):
            rows = algorithm.advantages([groups[number] for number in numbers])
        advantages.update(zip(numbers, rows, strict=True))
    return [advantages[number] for number in range(len(groups))]


def weights(batch: Batch) -> list[float]:
    """Return each Sample's part of the batch's mean, so that every Episode has one vote.

    A Sample weighs its share of its Episode over the number of Episodes; all weights sum to one.
    Raises TrainerError if they do not, or if a row cannot be trained.
    """
    for sample in batch.samples:
        _check(sample)
    values = [sample.share / batch.num_episodes for sample in batch.samples]
    if abs(sum(values) - bool(batch.num_episodes)) > 1e-6:
        raise TrainerError(
            f"the {len(values)} samples of step {batch.step} hold {sum(values):.6f} votes of "
            f"{batch.num_episodes} episodes, not all of them",
            hint="a batch needs all samples of every episode that it counts",
        )
    return values


def write(path: Path, batch: Batch) -> Batch:
    """Write a Batch atomically and return it with its file.

    Raises TrainerError, and RunError if the disk is full or recorded experts are missing.
    """
    # The rows must have their experts on disk before the file refers to them.
    for sample in batch.samples:
        _check_experts(sample)
    experts.check([piece for sample in batch.samples for piece in sample.routed])
    about = {"step": str(batch.step), "num_episodes": str(batch.num_episodes)}
    tables.write_samples(path, batch.samples, weights(batch), about)
    return replace(batch, path=path)


def read(path: Path, *, routed: bool = True) -> Batch:
    """Read a Batch; with `routed` its rows refer to their recorded experts.

    Raises TrainerError if the file is missing or damaged.
    """
    try:
        about = tables.read_metadata(path)
        samples = tuple(tables.read_samples(path, routed=routed))
        return Batch(int(about["step"]), samples, int(about["num_episodes"]))
    except (RunError, KeyError, ValueError) as error:
        raise TrainerError(
            f"cannot read the batch {path}: {error}", hint="delete it; the step is built again"
        ) from error


def write_values(path: Path, values: Sequence[Sequence[float]]) -> None:
    """Write one number for each trained token of each Sample, as float32. Raises RunError."""
    write_bytes(path, b"".join(array("f", row) for row in values))


def read_values(path: Path, batch: Batch) -> list[array[float]]:
    """Read a file of `write_values`. Raises RunError."""
    values = array("f")
    with disk_errors(path):
        values.frombytes(path.read_bytes())
    ends = accumulate((sample.num_trained_tokens for sample in batch.samples), initial=0)
    return [values[start:end] for start, end in pairwise(ends)]


def _check(sample: Sample) -> None:
    length = len(sample.ids)
    if not len(sample.mask) == len(sample.logprobs) == length:
        raise TrainerError(
            f"a sample of {sample.episode} has ids, mask and logprobs of different lengths",
            hint="each needs one entry per token",
        )
    if length < 2 or sample.mask[0]:
        raise TrainerError(
            f"a sample of {sample.episode} trains its first token, which has no prefix",
            hint="a row begins with at least one token of prompt",
        )
    if not sample.num_trained_tokens:
        raise TrainerError(
            f"a sample of {sample.episode} trains no token",
            hint="leave it out: it has no share in its episode's vote",
        )


def _check_experts(sample: Sample) -> None:
    end = 0
    for piece in sample.routed:
        if piece.start < end:
            raise TrainerError(
                f"a sample of {sample.episode} has two records of experts at {piece.start}",
                hint="the engine reads each position once, so one record is allowed",
            )
        end = piece.start + piece.num_positions
    if end > len(sample.ids) - 1:
        raise TrainerError(
            f"a sample of {sample.episode} has experts of {end} positions of {len(sample.ids) - 1}",
            hint="the engine never reads the last id of a row, so it has no experts",
        )
