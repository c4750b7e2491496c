"""A Batch as a Parquet file: what the controller hands to the trainer's ranks, and what it keeps.

docs/reference/samples.md lists its columns; the weights of a file sum to 1. The file's metadata has
the step and the number of Episodes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swerl.core import experts
from swerl.core.errors import RunError, TrainerError
from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.runs import sample_table


def weights(batch: Batch) -> list[float]:
    """Return each Sample's part of the batch's mean, so that every Episode has one vote.

    A Sample weighs its share of its Episode over the number of Episodes; all weights sum to one.
    Raises TrainerError where they do not, or where a row cannot be trained as it is.
    """
    for sample in batch.samples:
        _check(sample)
    values = [sample.share / batch.num_episodes for sample in batch.samples]
    if not values or abs(sum(values) - 1.0) > 1e-6:
        raise TrainerError(
            f"the {len(values)} samples of step {batch.step} hold {sum(values):.6f} votes of "
            f"{batch.num_episodes} episodes, not all of them",
            hint="every episode counted must have all its samples there",
        )
    return values


def write(path: Path, batch: Batch) -> Batch:
    """Write a Batch, whole or not at all, and return it with its file.

    Raises TrainerError, and RunError on a full disk or where recorded experts are gone from it.
    """
    for sample in batch.samples:
        _check_experts(sample)
    experts.check([piece for sample in batch.samples for piece in sample.routed])
    about = {"step": str(batch.step), "num_episodes": str(batch.num_episodes)}
    sample_table.write(path, batch.samples, weights(batch), about)
    return replace(batch, path=path)


def read(path: Path, *, routed: bool = True) -> Batch:
    """Read a Batch back; with `routed` its rows say where their experts lie.

    Raises TrainerError where the file is missing or damaged.
    """
    try:
        about = sample_table.metadata(path)
        samples = tuple(sample_table.read(path, routed=routed))
        return Batch(int(about["step"]), samples, int(about["num_episodes"]))
    except (RunError, KeyError, ValueError) as error:
        raise TrainerError(
            f"cannot read the batch {path}: {error}", hint="delete it; the step is built again"
        ) from error


def _check(sample: Sample) -> None:
    length = len(sample.ids)
    if not len(sample.mask) == len(sample.logprobs) == length:
        raise TrainerError(
            f"a sample of {sample.episode} has ids, mask and logprobs of different lengths",
            hint="each needs one entry a token",
        )
    if length < 2 or sample.mask[0]:
        raise TrainerError(
            f"a sample of {sample.episode} trains its first token, which nothing precedes",
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
                hint="each position is fed to the engine's model once",
            )
        end = piece.start + piece.num_positions
    if end > len(sample.ids) - 1:
        raise TrainerError(
            f"a sample of {sample.episode} has experts of {end} positions of {len(sample.ids) - 1}",
            hint="the last id of a row is never fed to the engine's model",
        )
