"""The model that a run begins with."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import RunError
from swerl.core.events import ignore
from swerl.recipe.schema import Recipe
from swerl.runs.layout import RunFolder
from swerl.training import train as learning


async def test_a_copy_that_a_full_disk_cut_short_is_one_error_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, root = tmp_path / "cache", tmp_path / "run"
    for folder in (cache, root):
        folder.mkdir()
    (cache / "config.json").write_text("{}")
    recipe = Recipe.model_validate({"name": "r"})

    async def made(*_: Any, **__: Any) -> Path:
        return cache

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(learning, "warm_start", made)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left") as error:
        patch.setattr(learning.shutil, "copy2", full)
        await learning.initial_model(recipe, RunFolder(root), tmp_path, ignore)
    assert "free some space" in error.value.hint
    model = await learning.initial_model(recipe, RunFolder(root), tmp_path, ignore)
    assert (model / "config.json").read_text() == "{}"
