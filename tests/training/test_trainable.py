"""A model that cannot be trained is refused before ranks are started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swerl.core.errors import InputError
from swerl.engines.families import tiny
from swerl.training.train import check_trainable


def test_a_model_of_an_unknown_line_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    family = tiny.build(tiny_model)
    check_trainable(family, tiny_model)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    with pytest.raises(InputError, match="'gpt_oss' can be run but not trained") as raised:
        check_trainable(family, tmp_path)
    assert "qwen3_5_moe" in raised.value.hint


def test_a_folder_without_a_config_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        check_trainable(tiny.build(tiny_model), tmp_path)
