"""Several updates on one Batch, and steps that are skipped: by the rule, and by real ranks."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import NotFiniteError
from swerl.core.events import Event, StepSkipped
from swerl.core.learning import Batch, StepStats
from swerl.core.sample import Sample
from swerl.training import batch as batches
from swerl.training.options import TrainerOptions
from swerl.training.updates import SkipCounter, join_stats, join_updates, split, with_base
from tests.unit.training.conftest import trainer_of


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


def test_reports_are_joined_by_their_meaning() -> None:
    extra = {"clip_fraction": 0.0, "optimizer_s": 1.0, "mismatch_max": 0.5, "lr": 1e-3}
    extra |= {"executed_tokens": 70.0, "bounded_tokens": 1.0, "rows_without_gradient_negative": 0.5}
    first = StepStats(1.0, 2.0, 30, 0.1, 4.0, extra)
    second = replace(first, loss=5.0, num_tokens=10, extra={**extra, "clip_fraction": 1.0})
    # A part without a row of this sign reports no share of them.
    del second.extra["rows_without_gradient_negative"]  # type: ignore[attr-defined]
    joined = join_stats([first, second])
    assert joined is not None
    assert (joined.loss, joined.num_tokens, joined.duration_s) == (2.0, 40, 8.0)
    assert joined.extra == {
        "clip_fraction": 0.25, "optimizer_s": 2.0, "mismatch_max": 0.5, "lr": 1e-3,
        "executed_tokens": 140.0, "bounded_tokens": 2.0, "rows_without_gradient_negative": 0.5,
    }  # fmt: skip
    assert join_stats([]) is None
    assert join_stats([first]) is first


def test_log_probabilities_stay_with_their_episodes_and_skipped_parts_have_none() -> None:
    parts = split(BATCH, 3)
    stats = [StepStats(1.0, 2.0, 1, 0.1, 4.0, logprobs=[[-1.0]] * len(p.samples)) for p in parts]
    found = join_updates(parts, [stats[0], None, stats[2]]).logprobs
    assert [episode for episode, _ in found] == ["a.0", "a.1", "a.1", "c.0"]


class Fails:
    """A trainer of which the named steps are not finite; the rest of a Trainer is not used."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    async def step(self, batch: Batch) -> str:
        if batch.step in self._steps:
            message = f"step {batch.step} has loss nan"
            raise NotFiniteError(message)
        return "taken"


async def take(skips: SkipCounter, trainer: Any, step: int, events: list[Event]) -> Any:
    batch = replace(BATCH, step=step)
    return await skips.step(trainer, batch, Path(f"samples/{step:05d}.parquet"), events.append)


async def test_a_skipped_step_is_counted_and_reported_with_its_batch() -> None:
    skips, events = SkipCounter(), list[Event]()
    assert await take(skips, Fails(0), 0, events) is None
    assert (skips.total, skips.in_a_row) == (1, 1)
    assert events == [StepSkipped(0, "step 0 has loss nan", "samples/00000.parquet")]
    assert await take(skips, Fails(), 1, events) == "taken"
    assert (skips.total, skips.in_a_row) == (1, 0)


async def test_too_many_in_a_row_stop_the_run_also_across_a_restart() -> None:
    trainer = Fails(0, 1, 2, 3)
    first = SkipCounter()
    for step in (0, 1, 2):
        assert await take(first, trainer, step, []) is None
    resumed = SkipCounter(total=first.total, in_a_row=first.in_a_row)
    with pytest.raises(NotFiniteError, match="4 steps in a row were skipped") as caught:
        await take(resumed, trainer, 3, [])
    assert "samples/00003.parquet" in caught.value.hint


@pytest.mark.integration
async def test_a_later_update_is_measured_against_the_policy_before_the_first(
    tiny_model: Path, options: TrainerOptions, random_batch
) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")
    fast = options.model_copy(update={"warmup_steps": 0, "ranks": 2})
    rows = [replace(row, task=row.episode) for row in random_batch(0).samples]
    async with trainer_of(tiny_model, fast, "grpo", mismatch="token-tis") as trainer:
        parts = await with_base(trainer, split(Batch(0, tuple(rows), 6), 2))
        assert [bool(part.base) for part in parts] == [False, True]
        for pid in trainer.pids:  # a scheduler signals every process; the step is still taken
            os.kill(pid, signal.SIGTERM)
        first, second = [await trainer.step(part) for part in parts]
        assert (first.extra["ratio"], first.extra["clip_fraction"]) == (pytest.approx(1.0), 0)
        assert abs(second.extra["ratio"] - 1) > 1e-3
        # The record and the comparison with the engine are of the policy before both.
        for row, base in zip(second.logprobs, parts[1].base, strict=True):
            assert list(row) == list(base)
        moved = await trainer.logprobs(parts[1])
        assert list(moved[0]) != list(parts[1].base[0])
