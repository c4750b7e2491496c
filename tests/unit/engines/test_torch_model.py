"""The forward in NumPy against transformers, its draws, and what it refuses to serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from swerl.core.errors import EngineError
from swerl.engines._torch_batch import RECORD
from swerl.engines._torch_model import DenseModel, draw, read_shape, read_weights
from tests.unit.engines.families.lines import LINES, build

TOLERANCE = 1e-4


def load(folder: Path, num_positions: int = 256) -> DenseModel:
    shape = read_shape(folder)
    return DenseModel(shape, read_weights(folder, shape), num_positions)


@pytest.mark.parametrize("line", ["llama", "mistral", "qwen2", "smollm2", "qwen3", "qwen3_tied"])
def test_logits_agree_with_transformers(line: str, tmp_path: Path) -> None:
    theirs = build(line)
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    model = load(tmp_path)
    ids_BT = torch.randint(0, 320, (3, 90))
    positions_BT = np.arange(90)[None].repeat(3, 0)
    found = model.logits(model.forward(ids_BT.numpy(), positions_BT, model.new_cache(3), 90))
    with torch.inference_mode():
        expected = theirs(ids_BT).logits
    assert abs(found - expected.numpy()).max() < 1e-5


def test_chunks_of_any_size_give_the_logits_of_the_whole(tiny_model: Path, reference: Any) -> None:
    model = load(tiny_model)
    cache, ids_BT = model.new_cache(2), torch.randint(0, 512, (2, 40))
    parts = []
    for start, stop in ((0, 17), (17, 18), (18, 39), (39, 40)):
        positions_BT = np.arange(start, stop)[None].repeat(2, 0)
        hidden = model.forward(ids_BT[:, start:stop].numpy(), positions_BT, cache, stop)
        parts.append(model.logits(hidden))
    expected = torch.stack([reference.logits(tiny_model, row.tolist()) for row in ids_BT])
    assert abs(np.concatenate(parts, 1) - expected.numpy()).max() < TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({**LINES["qwen3_moe"]}, "qwen3_moe is not a dense model"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_config_of_another_model_is_refused(
    tmp_path: Path, tiny_model: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((tiny_model / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=message) as caught:
        read_shape(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "cut short", "none"])
def test_wrong_weights_are_refused_by_name(tmp_path: Path, tiny_model: Path, fault: str) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "model.layers.2.mlp.up_proj.weight"
        tensors[name] = torch.zeros(1)
    elif fault == "shape":
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path)
    if fault == "cut short":
        path.write_bytes(path.read_bytes()[:-8])
        name = "safetensors"
    elif fault == "none":
        path.unlink()
        name = "safetensors"
    with pytest.raises(EngineError, match=name):
        read_weights(tmp_path, read_shape(tmp_path))


PROBS = np.array([0.1, 0.4, 0.05, 0.25, 0.2], dtype=np.float32)


def table(num_rows: int, **settings: float) -> NDArray[np.void]:
    """Return settings for rows with one seed each."""
    rows = np.zeros(num_rows, dtype=RECORD)
    rows["temperature"] = 1.0
    rows["top_p"] = 1.0
    rows["top_k"] = -1
    rows["seed"] = np.arange(num_rows)
    for name, value in settings.items():
        rows[name] = value
    return rows


def frequencies(**settings: float) -> NDArray[np.float64]:
    num_rows = 20_000
    draws = draw(np.log(PROBS)[None].repeat(num_rows, 0), table(num_rows, **settings))
    return np.bincount(draws.ids_B, minlength=5) / num_rows


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, PROBS**2 / (PROBS**2).sum()),
        ({"top_k": 2}, np.array([0, 0.4, 0, 0.25, 0]) / 0.65),
        ({"top_p": 0.7}, np.array([0, 0.4, 0, 0.25, 0.2]) / 0.85),
        ({"top_p": 0.01}, np.array([0, 1.0, 0, 0, 0])),
        ({"temperature": 0.0}, np.array([0, 1.0, 0, 0, 0])),
    ],
    ids=["plain", "temperature", "top-k", "top-p", "tiny top-p", "greedy"],
)
def test_frequencies_match(settings: dict[str, float], expected: NDArray[np.float64]) -> None:
    # Five standard deviations of a frequency over 20,000 draws.
    assert abs(frequencies(**settings) - expected).max() < 0.018


def test_a_row_draws_the_same_in_any_company() -> None:
    logits_BV = np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32)
    mixed = table(8)
    mixed["top_p"][3] = 0.5
    mixed["temperature"][5] = 0.0
    together = draw(logits_BV, mixed)
    alone = [draw(logits_BV[i : i + 1], mixed[i : i + 1]).ids_B[0] for i in range(8)]
    assert together.ids_B.tolist() == alone


def test_logprobs_are_those_before_top_k_and_top_p() -> None:
    draws = draw(np.log(PROBS)[None], table(1, top_k=1))
    assert draws.logprobs_B[0] == pytest.approx(np.log(0.4), abs=1e-6)
