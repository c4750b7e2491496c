"""The Batch on disk, and every Episode's one vote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.errors import TrainerError
from swerl.learning import Batch
from swerl.training import batch as batches

MakeBatch = Callable[..., Batch]


def test_a_written_batch_reads_back_the_same(tmp_path: Path, random_batch: MakeBatch) -> None:
    batch = random_batch(3)
    batches.write(tmp_path / "new" / "3.parquet", batch)
    read = batches.read(tmp_path / "new" / "3.parquet")
    assert (read.step, read.num_episodes) == (3, 6)
    for before, after in zip(batch.samples, read.samples, strict=True):
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-6)
        assert replace(after, logprobs=before.logprobs) == before
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["3.parquet"]


def test_the_file_has_the_documented_columns(tmp_path: Path, random_batch: MakeBatch) -> None:
    import pyarrow.parquet as pq

    batches.write(tmp_path / "batch.parquet", random_batch(0))
    table = pq.read_table(tmp_path / "batch.parquet")
    assert batches.__doc__
    assert all(name in batches.__doc__ for name in table.column_names)
    assert sum(table.column("weight").to_pylist()) == pytest.approx(1.0)


def test_every_episode_has_one_vote(random_batch: MakeBatch) -> None:
    batch = random_batch(0)
    votes: dict[str, float] = {}
    for sample, weight in zip(batch.samples, batches.weights(batch), strict=True):
        votes[sample.episode] = votes.get(sample.episode, 0.0) + weight
    assert list(votes.values()) == pytest.approx([1 / 6] * 6)


def test_a_batch_without_all_samples_of_an_episode_is_refused(random_batch: MakeBatch) -> None:
    batch = random_batch(0)
    with pytest.raises(TrainerError, match="not all of them"):
        batches.weights(replace(batch, samples=batch.samples[1:]))
    with pytest.raises(TrainerError, match="0 samples"):
        batches.weights(replace(batch, samples=()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": (1, 1, 0)}, "trains its first token"),
        ({"ids": (7,), "mask": (0,), "logprobs": (0.0,)}, "trains its first token"),
        ({"mask": (0, 0, 0)}, "trains no token"),
        ({"logprobs": (0.0,)}, "different lengths"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused(
    tmp_path: Path, random_batch: MakeBatch, change: dict[str, object], message: str
) -> None:
    row = replace(
        random_batch(0).samples[2],
        share=1.0,
        **{"ids": (1, 2, 3), "mask": (0, 1, 0), "logprobs": (0.0, -1.0, 0.0), **change},
    )
    with pytest.raises(TrainerError, match=message):
        batches.write(tmp_path / "batch.parquet", Batch(0, (row,), 1))


def test_a_damaged_file_is_a_trainer_error(tmp_path: Path, random_batch: MakeBatch) -> None:
    path = tmp_path / "batch.parquet"
    with pytest.raises(TrainerError, match="cannot read the batch"):
        batches.read(path)
    batches.write(path, random_batch(0))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(TrainerError, match="cannot read the batch"):
        batches.read(path)
