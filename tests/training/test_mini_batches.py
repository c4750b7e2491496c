from __future__ import annotations

from dataclasses import replace

import pytest

from swerl.core.learning import Batch, StepStats
from swerl.core.sample import Sample
from swerl.training import batch as batches
from swerl.training.updates import join, learned, split


def row(task: str, episode: str, share: float = 1.0) -> Sample:
    return Sample(episode, task, (1, 2), (0, 1), (0.0, -1.0), share=share)


BATCH = Batch(
    3,
    (row("a", "a.0"), row("a", "a.1", 0.5), row("a", "a.1", 0.5), row("b", "b.0"), row("c", "c.0")),
    4,
)


def test_groups_stay_whole_and_every_row_is_in_one_part() -> None:
    parts = split(BATCH, 2)
    assert [{sample.task for sample in part.samples} for part in parts] == [{"a", "b"}, {"c"}]
    assert [part.num_episodes for part in parts] == [3, 1]
    assert sum((part.samples for part in parts), ()) == BATCH.samples
    for part in parts:
        assert sum(batches.weights(part)) == pytest.approx(1.0)


def test_there_are_no_more_parts_than_groups() -> None:
    assert len(split(BATCH, 9)) == 3
    assert split(BATCH, 1) == [BATCH]


def test_reports_are_joined_by_what_they_mean() -> None:
    extra = {"clip_fraction": 0.0, "optimizer_s": 1.0, "mismatch_max": 0.5, "lr": 1e-3}
    first = StepStats(1.0, 2.0, 30, 0.1, 4.0, extra)
    second = replace(first, loss=5.0, num_tokens=10, extra={**extra, "clip_fraction": 1.0})
    joined = join([first, second])
    assert joined is not None
    assert (joined.loss, joined.num_tokens, joined.duration_s) == (2.0, 40, 8.0)
    assert joined.extra == {
        "clip_fraction": 0.25, "optimizer_s": 2.0, "mismatch_max": 0.5, "lr": 1e-3,
    }  # fmt: skip
    assert join([]) is None
    assert join([first]) is first


def test_tasks_of_a_part_that_was_skipped_are_named() -> None:
    stats = StepStats(1.0, 2.0, 30, 0.1, 4.0, {})
    found = learned(split(BATCH, 3), [None, stats, None])
    assert (found.stats, found.skipped) == (stats, {"a", "c"})
    assert learned([BATCH], [None]).stats is None
