"""Steps that cannot be trained: by the rule alone, and by real ranks on a Batch with NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import NotFiniteError
from swerl.core.events import Event, StepSkipped
from swerl.core.learning import Batch
from swerl.training.options import TrainerOptions
from swerl.training.updates import Skipping

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")


class Fails:
    """A trainer of which the named steps are not finite; the rest of a Trainer is not used."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    async def step(self, batch: Batch) -> str:
        if batch.step in self._steps:
            message = f"step {batch.step} has loss nan"
            raise NotFiniteError(message)
        return "taken"


async def take(skipping: Skipping, trainer: Any, step: int, told: list[Event]) -> Any:
    batch = Batch(step, (), 0)
    return await skipping.step(trainer, batch, Path(f"samples/{step:05d}.parquet"), told.append)


async def test_a_skipped_step_is_counted_and_told_with_its_batch() -> None:
    skipping, told = Skipping(2), list[Event]()
    assert await take(skipping, Fails(0), 0, told) is None
    assert (skipping.total, skipping.in_a_row) == (1, 1)
    assert told == [StepSkipped(0, "step 0 has loss nan", "samples/00000.parquet")]
    assert await take(skipping, Fails(), 1, told) == "taken"
    assert (skipping.total, skipping.in_a_row) == (1, 0)


async def test_too_many_in_a_row_stop_the_run_also_across_a_restart() -> None:
    trainer = Fails(0, 1, 2)
    first = Skipping(2)
    for step in (0, 1):
        assert await take(first, trainer, step, []) is None
    resumed = Skipping(2, total=first.total, in_a_row=first.in_a_row)
    with pytest.raises(NotFiniteError, match="3 steps in a row were skipped") as caught:
        await take(resumed, trainer, 2, [])
    assert "samples/00002.parquet" in caught.value.hint


async def test_real_ranks_skip_and_go_on_as_if_the_step_had_not_been(
    tiny_model: Path, options: TrainerOptions, random_batch, tmp_path: Path
) -> None:
    from swerl.training.trainer import MegatronTrainer

    good = random_batch(0)
    rows = tuple(replace(row, advantage=float("nan")) for row in good.samples)
    broken = replace(good, samples=rows)
    told: list[Event] = []

    async def versions(trainer: MegatronTrainer, *batches: Batch) -> list[str]:
        found, skipping = [], Skipping(1)
        for batch in batches:
            await skipping.step(trainer, batch, tmp_path / "batch.parquet", told.append)
            found.append((await trainer.publish()).checksum)
        return found

    async def trained(*batches: Batch) -> list[str]:
        async with MegatronTrainer(
            model=tiny_model, family="tiny", algorithm="gspo", options=options
        ) as trainer:
            return await versions(trainer, *batches)

    with_nan = await trained(good, broken, random_batch(2))
    without = await trained(good, random_batch(2))
    assert with_nan[0] == with_nan[1]
    assert [with_nan[0], with_nan[2]] == without
    assert [type(event) for event in told] == [StepSkipped]
