"""The checksum names the content of a model folder and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swerl.core.errors import EngineError
from swerl.engines._weights import checksum, model_shape


def test_the_spread_over_files_does_not_matter(tmp_path: Path, tiny_model: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[:5]}, tmp_path / "b.safetensors")
    save_file({n: tensors[n] for n in names[5:]}, tmp_path / "a.safetensors", {"format": "pt"})
    assert checksum(tmp_path) == checksum(tiny_model)
    index = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    save_file({names[0]: torch.zeros(1)}, tmp_path / "model.safetensors")  # an older copy
    assert checksum(tmp_path) == checksum(tiny_model)


@pytest.mark.parametrize("change", ["value", "name", "dtype", "shape"])
def test_every_change_of_content_shows(tmp_path: Path, change: str) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors")
    before = checksum(tmp_path)
    changed = {
        "value": {"w": torch.tensor([0.0, 0.0, 0.0, 1e-9])},
        "name": {"v": torch.zeros(4)},
        "dtype": {"w": torch.zeros(4, dtype=torch.int32)},
        "shape": {"w": torch.zeros(2, 2)},
    }[change]
    save_file(changed, tmp_path / "model.safetensors")
    assert checksum(tmp_path) != before


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, (9).to_bytes(8, "little") + b"not json!"])
def test_a_broken_file_is_one_clear_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(EngineError, match="safetensors") as caught:
        checksum(tmp_path)
    assert caught.value.hint


def test_the_vocabulary_is_read_where_it_is_stated(tmp_path: Path, tiny_model: Path) -> None:
    assert model_shape(tiny_model).num_vocab == 512
    assert model_shape(tmp_path).num_vocab is None
