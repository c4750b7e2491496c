"""The processes of real ranks: what a step that fails in them says to the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra swerl[twin]")

from swerl.core.errors import RankLostError
from swerl.core.learning import Batch
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer


async def test_an_exception_in_a_step_is_told_with_its_place(
    tiny_model: Path, options: TrainerOptions, random_batch: Callable[..., Batch]
) -> None:
    batch = random_batch(0)
    first, *rest = batch.samples
    unknown = replace(first, ids=(10**6, *first.ids[1:]))
    trainer = MegatronTrainer(model=tiny_model, family="tiny", algorithm="sft", options=options)
    async with trainer:
        with pytest.raises(RankLostError) as error:
            await trainer.step(replace(batch, samples=(unknown, *rest)))
    said = str(error.value)
    assert "a rank of the trainer died in `step` (rank 0 on " in said and "exit code 1" in said
    assert "): IndexError: index out of range" in said and "(in swerl/training/rank/" in said
    assert "FutureWarning" not in said
    assert "trainer-rank0.log" in error.value.hint
