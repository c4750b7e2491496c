"""A tiny model and random rows for the trainer's tests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyShape
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import make_tiny_model

SHAPE = TinyShape(
    init_std=0.02,
    vocab_size=320,
    hidden_size=64,
    ffn_hidden_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose weights are spread so far that every part of the model matters."""
    import torch
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("tiny")
    (root / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), root / "tokenizer")
    folder = make_tiny_model(root / "model", SHAPE, seed=0, tokenizer=root / "tokenizer", eos_id=2)
    torch.manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for weight in weights.values():
        weight += (
            torch.rand_like(weight) - 0.5 if weight.ndim == 1 else 0.1 * torch.randn_like(weight)
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def options(tmp_path: Path) -> TrainerOptions:
    """Options with their folders in the test's own folder."""
    return TrainerOptions(
        checkpoint_dir=tmp_path / "checkpoints",
        publish_dir=tmp_path / "weights",
        log_dir=tmp_path / "logs",
        lr=1e-3,
        warmup_steps=2,
        weight_decay=0.1,
        tokens_per_micro_batch=100,
    )


def trainer_of(
    model: Path, options: TrainerOptions, algorithm: str = "gspo", **algorithm_options: Any
) -> MegatronTrainer:
    """Return a trainer of a tiny model."""
    return MegatronTrainer(
        model=model,
        family="tiny",
        algorithm=algorithm,
        algorithm_options=algorithm_options,
        options=options,
    )


@pytest.fixture(scope="session")
def random_batch():
    """Make a Batch of random rows; two Samples belong to the first Episode."""

    def make(step: int, *, num_rows: int = 7, sampled: bool = True) -> Batch:
        rng = random.Random(step)
        rows = [_sample(rng, f"episode-{max(i, 1)}", sampled) for i in range(num_rows)]
        rows[0] = _with_share(rows[0], 0.25)
        rows[1] = _with_share(rows[1], 0.75)
        return Batch(step, tuple(rows), num_rows - 1)

    return make


def _sample(rng: random.Random, episode: str, sampled: bool) -> Sample:
    length = rng.randint(20, 60)
    mask = [0] * 5 + [int(t % 20 < 12) for t in range(length - 5)]
    return Sample(
        episode=episode,
        task="task",
        ids=tuple(rng.randrange(SHAPE.vocab_size) for _ in range(length)),
        mask=tuple(mask),
        logprobs=tuple(-6.0 - rng.random() * 0.01 if trained else 0.0 for trained in mask),
        weight_versions=("000000",) if sampled else (),
        advantage=rng.uniform(-1.5, 1.5),
    )


def _with_share(sample: Sample, share: float) -> Sample:
    return replace(sample, share=share)
