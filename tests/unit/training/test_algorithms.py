"""Losses whose divisor is the whole batch's, over real ranks and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from swerl.core.learning import Batch
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer

MakeBatch = Callable[..., Batch]


async def _step(model: Path, options: TrainerOptions, algorithm: str, batch: Batch):
    trainer = MegatronTrainer(
        model=model,
        family="tiny",
        algorithm=algorithm,
        algorithm_options={"mismatch": "token-tis", "kl_coef": 0.1, "entropy_coef": 0.01},
        options=options,
    )
    async with trainer:
        logps = await trainer.logprobs(batch)
        return logps, await trainer.step(batch)


@pytest.mark.parametrize("algorithm", ["dapo", "dr-grpo"])
async def test_ranks_and_micro_batches_divide_by_the_whole_batch(
    tiny_model: Path, options: TrainerOptions, random_batch: MakeBatch, algorithm: str
) -> None:
    batch = random_batch(0)
    logps, one = await _step(tiny_model, options, algorithm, batch)
    halves = options.model_copy(update={"ranks": 2, "tokens_per_micro_batch": 64})
    _, two = await _step(tiny_model, halves, algorithm, batch)
    assert two.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-9)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for name in ("policy_loss", "ratio", "clip_fraction", "mismatch_weight", "mismatch_cut", "kl"):
        assert two.extra[name] == pytest.approx(one.extra[name], rel=1e-4, abs=1e-6)
    assert one.extra["policy_loss"] == pytest.approx(
        _written_out(batch, logps, algorithm), rel=1e-4
    )


def _written_out(batch: Batch, logps: Sequence[Sequence[float]], algorithm: str) -> float:
    """Return minus the sum of truncated ratio times advantage, over the algorithm's divisor."""
    total = 0.0
    for sample, row in zip(batch.samples, logps, strict=True):
        engine = [logp for logp, on in zip(sample.logprobs, sample.mask, strict=True) if on]
        weights = [min(math.exp(ours - its), 2.0) for ours, its in zip(row, engine, strict=True)]
        total += sum(weights) * sample.advantage
    num_tokens = sum(sample.num_trained_tokens for sample in batch.samples)
    return -total / (num_tokens if algorithm == "dapo" else 1024 * batch.num_episodes)
