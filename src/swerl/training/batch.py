"""A Batch as a Parquet file: what the controller hands to the trainer's ranks.

One row a Sample. Columns: episode, task (strings); ids (list of int32); mask (list of int8, 1 on
trained tokens); logprobs (list of float32, 0 on context); advantage, share, weight (float64; the
weights of a file sum to 1); versions (list of strings: the weights that sampled the row; empty for
rows that no engine sampled). The step and the number of Episodes stand in the file's metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerl.errors import TrainerError
from swerl.learning import Batch
from swerl.run.files import disk_errors
from swerl.sample import Sample

if TYPE_CHECKING:
    import pyarrow as pa


def weights(batch: Batch) -> list[float]:
    """Return each Sample's part of the batch's mean, so that every Episode has one vote.

    A Sample weighs its share of its Episode over the number of Episodes; all weights sum to one.
    Raises TrainerError where they do not, or where a row cannot be trained as it is.
    """
    for sample in batch.samples:
        _check(sample)
    values = [sample.share / batch.num_episodes for sample in batch.samples]
    if not values or abs(sum(values) - 1.0) > 1e-6:
        message = (
            f"the {len(values)} samples of step {batch.step} hold {sum(values):.6f} votes of "
            f"{batch.num_episodes} episodes, not all of them"
        )
        raise TrainerError(message, hint="every episode counted must have all its samples there")
    return values


def write(path: Path, batch: Batch) -> None:
    """Write a Batch, whole or not at all. Raises TrainerError, and RunError on a full disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "episode": sample.episode,
            "task": sample.task,
            "ids": sample.ids,
            "mask": sample.mask,
            "logprobs": sample.logprobs,
            "advantage": sample.advantage,
            "share": sample.share,
            "weight": weight,
            "versions": sample.weight_versions,
        }
        for sample, weight in zip(batch.samples, weights(batch), strict=True)
    ]
    temporary = path.with_suffix(".part")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, _schema(batch)), temporary)
        temporary.replace(path)


def read(path: Path) -> Batch:
    """Read a Batch back. Raises TrainerError where the file is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata
        return Batch(
            step=int(metadata[b"step"]),
            samples=tuple(_sample(row) for row in table.to_pylist()),
            num_episodes=int(metadata[b"num_episodes"]),
        )
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        message = f"cannot read the batch {path}: {error!r}"
        raise TrainerError(message, hint="delete it; the step is built again") from error


def _check(sample: Sample) -> None:
    length = len(sample.ids)
    if not len(sample.mask) == len(sample.logprobs) == length:
        message = f"a sample of {sample.episode} has ids, mask and logprobs of different lengths"
        raise TrainerError(message, hint="each needs one entry a token")
    if length < 2 or sample.mask[0]:
        message = f"a sample of {sample.episode} trains its first token, which nothing precedes"
        raise TrainerError(message, hint="a row begins with at least one token of prompt")
    if not sample.num_trained_tokens:
        message = f"a sample of {sample.episode} trains no token"
        raise TrainerError(message, hint="leave it out: it has no share in its episode's vote")


def _sample(row: dict[str, Any]) -> Sample:
    return Sample(
        episode=row["episode"],
        task=row["task"],
        ids=tuple(row["ids"]),
        mask=tuple(row["mask"]),
        logprobs=tuple(row["logprobs"]),
        weight_versions=tuple(row["versions"]),
        advantage=row["advantage"],
        share=row["share"],
    )


def _schema(batch: Batch) -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("episode", pa.string()),
            ("task", pa.string()),
            ("ids", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
            ("advantage", pa.float64()),
            ("share", pa.float64()),
            ("weight", pa.float64()),
            ("versions", pa.list_(pa.string())),
        ],
        metadata={"step": str(batch.step), "num_episodes": str(batch.num_episodes)},
    )
