"""Checkpoints of real ranks: any layout reads what another wrote, and goes on as it would have."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from swerl.core.errors import TrainerError
from swerl.core.learning import Batch, StepStats
from swerl.training.checkpoint import folder as checkpoint_meta
from swerl.training.checkpoint.files import CheckpointReader
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from tests.unit.training.conftest import trainer_of

MakeBatch = Callable[..., Batch]
LAYOUTS = {
    "tensor 2 x pipeline 2": {"ranks": 4, "tensor_parallel": 2, "pipeline_parallel": 2},
    "context 2": {"ranks": 2, "context_parallel": 2},
}


def _whole(folder: Path) -> dict[str, torch.Tensor]:
    source = CheckpointReader(folder)
    return {key: source.tensor(key) for key in source.shapes}


def _assert_same_content(folder: Path, other: Path) -> None:
    one, two = _whole(folder), _whole(other)
    assert one.keys() == two.keys()
    assert {key for key, value in one.items() if not torch.equal(value, two[key])} == set()
    assert any(value.any() for key, value in one.items() if key.startswith("optimizer.exp_avg."))


async def _step(trainer: MegatronTrainer, batch: Batch) -> tuple[StepStats, str]:
    stats = await trainer.step(batch)
    return stats, (await trainer.publish()).checksum


@pytest.mark.integration
async def test_every_layout_reads_and_writes_the_same_checkpoint(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    folder = options.checkpoint_dir
    async with trainer_of(tiny_model, options) as single:
        for step in range(2):
            await single.step(random_batch(step))
        await single.save(2, kept=range(9))
        # The step begins before the files are written, and must not get into them.
        wanted, checksum = await _step(single, random_batch(2))
        saved = await single.saved()
        assert saved is not None and saved.num_bytes > 0
    for number, layout in enumerate(LAYOUTS.values()):
        several = options.model_copy(update=layout)
        async with trainer_of(tiny_model, several) as trainer:
            await trainer.restore(2)
            await trainer.save(3 + number, kept=range(9))
            found, split = await _step(trainer, random_batch(2))
            assert found.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-7)
            assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
            await trainer.saved()
            for pid in trainer.pids:
                os.kill(pid, signal.SIGKILL)
        _assert_same_content(folder / "00002", folder / f"{3 + number:05d}")
    async with trainer_of(tiny_model, options) as single:
        for number in range(len(LAYOUTS)):
            await single.restore(3 + number)
            assert (await _step(single, random_batch(2)))[1] == checksum
    # Ranks that were killed go on bit for bit, here under the last layout.
    async with trainer_of(tiny_model, several) as trainer:
        await trainer.restore(4)
        assert (await _step(trainer, random_batch(2)))[1] == split


async def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch
) -> None:
    folder = options.checkpoint_dir
    async with trainer_of(tiny_model, options) as trainer:
        await trainer.step(random_batch(0))
        before = await trainer.publish()
        await trainer.save(1)
        await trainer.saved()
        await trainer.save(2)
        os.kill(trainer.pids[0], signal.SIGKILL)
        try:
            await trainer.saved()
            assert checkpoint_meta.steps(folder) == [1, 2]
        except TrainerError as error:
            assert "before the checkpoint of step 2 was whole" in str(error)
    left = checkpoint_meta.steps(folder)
    (folder / ".00009.part").mkdir()
    async with trainer_of(tiny_model, options) as resumed:
        for step in left:
            await resumed.restore(step)
            assert (await resumed.publish()).checksum == before.checksum
        await resumed.save(3)
        await resumed.saved()
    assert not list(folder.glob(".*.part"))
    assert 3 in checkpoint_meta.steps(folder)


@pytest.mark.integration
async def test_without_async_save_files_are_there_at_once_and_another_family_is_refused(
    tiny_model: Path, options: TrainerOptions
) -> None:
    async with trainer_of(tiny_model, options.model_copy(update={"async_save": False})) as trainer:
        await trainer.save(1, kept=[7])
        assert checkpoint_meta.steps(options.checkpoint_dir) == [1]
        assert await trainer.saved() is not None
        assert await asyncio.wait_for(trainer.saved(), 1) is None
        meta = options.checkpoint_dir / "00001" / "meta.json"
        text = meta.read_text()
        meta.write_text(text.replace('"tiny"', '"glm4"'))
        with pytest.raises(TrainerError, match="of family 'glm4'") as error:
            await trainer.restore(1)
        assert "model.family = 'glm4'" in error.value.hint
        meta.write_text(text)
        await trainer.restore(1)
