"""The tiny model: the same bytes for the same seed, and readable by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swerl.core.errors import InputError
from swerl.engines._weights import checksum
from swerl.engines.families import tiny
from swerl.recipe.schema import ModelShape
from swerl.training.warm_start import make_tiny_model


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), folder)
    return folder


def test_a_seed_gives_the_same_weights_every_time(tmp_path: Path, tokenizer: Path) -> None:
    folders = [
        make_tiny_model(tmp_path / name, ModelShape(), seed=seed, tokenizer=tokenizer, eos_id=2)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    sums = [checksum(folder) for folder in folders]
    assert sums[0] == sums[1] != sums[2]
    assert (folders[0] / "tokenizer.json").read_bytes() == (
        tokenizer / "tokenizer.json"
    ).read_bytes()


def test_transformers_finds_every_weight_it_expects(tmp_path: Path, tokenizer: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "model", ModelShape(), seed=0, tokenizer=tokenizer, eos_id=2
    )
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(param.numel() for param in model.parameters()) == 459_520
    matrix = model.model.layers[0].mlp.up_proj.weight
    assert matrix.dtype == torch.float32
    assert matrix.std().item() == pytest.approx(ModelShape().init_std, rel=0.02)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        make_tiny_model(tmp_path / "model", ModelShape(), seed=0, tokenizer=tmp_path, eos_id=2)
