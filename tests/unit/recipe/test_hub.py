"""Models by their hub id, fetched from a stand-in of the hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from swerl.core.errors import InputError
from swerl.engines.families import tiny
from swerl.recipe.hub import model_folder, model_name, push
from swerl.training.warm_start import make_tiny_model
from tests.unit.tasks.fake_hub import COMMIT, serve

pytest.importorskip("huggingface_hub")
CODE = """
import sys
from pathlib import Path
from swerl.core.errors import InputError
from swerl.recipe.load import load
try:
    model = load([], ["name=a", f"model.path={sys.argv[1]}"], fetch=sys.argv[2] == "fetch").model
    print(model.family, model.path, sep="\\n")
except InputError as error:
    print(f"error: {error} hint: {error.hint}")
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A model's needed files, and files that a repository has beside them."""
    shape = tiny.TinyShape(num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=16)
    (tmp_path / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), tmp_path / "tokenizer")
    folder = make_tiny_model(
        tmp_path / "model", shape, seed=0, tokenizer=tmp_path / "tokenizer", eos_id=0
    )
    needed = {path.name: path.read_bytes() for path in folder.iterdir()}
    rest = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.json")
    return needed | dict.fromkeys(rest, b"unneeded")


def loaded(home: Path, url: str, model: str, how: str = "fetch", **env: str) -> list[str]:
    """Load a recipe in a process of its own, as huggingface-hub reads its settings on import."""
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | {
        "HF_ENDPOINT": url, **env}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE, model, how], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_id_is_fetched_once_without_files_that_nobody_reads(
    tmp_path: Path, files: Mapping[str, bytes]
) -> None:
    home = tmp_path / "hf"
    with serve("owner/tiny-1B", files) as hub:
        assert loaded(home, hub.url, "owner/tiny-1B", "look") == ["auto", "owner/tiny-1B"]
        family, folder = loaded(home, hub.url, "owner/tiny-1B@main")
        fetched = [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line]
        again = loaded(home, hub.url, "owner/tiny-1B")
    names = {line.rpartition("/")[2] for line in fetched}
    assert {path.name for path in Path(folder).iterdir()} == names
    assert names == {name for name, data in files.items() if data != b"unneeded"}
    assert all(f"/resolve/{COMMIT}/" in line for line in fetched)
    assert family == "tiny"
    assert again == [family, folder]
    assert len([line for line in hub.asked if line in fetched]) == len(fetched)
    assert model_name(Path(folder)) == f"owner/tiny-1B@{COMMIT}"
    offline = loaded(home, "http://127.0.0.1:9", "owner/tiny-1B", HF_HUB_OFFLINE="1")
    assert offline == [family, folder]
    assert loaded(home, "http://127.0.0.1:9", "owner/tiny-1B", "look") == [family, folder]


def test_what_cannot_be_fetched_is_named_with_the_command(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    home = tmp_path / "hf"
    (line,) = loaded(home, "http://127.0.0.1:9", "owner/a@v1", HF_HUB_OFFLINE="1")
    assert "owner/a@v1 is not a folder" in line
    assert "hf download owner/a --revision v1 --local-dir DIR" in line
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    with serve("owner/tiny-1B", files) as hub:
        (absent,) = loaded(home, hub.url, "owner/other")
        (partial,) = loaded(home, hub.url, "owner/tiny-1B")
    assert "the hub does not give it" in absent
    assert "lacks model-2.safetensors" in partial


@pytest.mark.parametrize("error", [httpx.ReadTimeout("slow"), RuntimeError("CAS service error")])
def test_a_transfer_that_breaks_off_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
    monkeypatch.setattr("huggingface_hub.HfApi", Mock(side_effect=error))
    with pytest.raises(InputError, match=f"the hub does not give it: {error}"):
        model_folder(Path("owner/a"), fetch=True)
    with pytest.raises(InputError, match=f"the hub does not take me/a: {error}"):
        push(tmp_path, "me/a", kind="model")


def test_a_folder_is_never_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    Path("owner/a").mkdir(parents=True)
    for path in (Path("owner/a"), Path("/models/a"), Path("a/b/c")):
        assert model_folder(path, fetch=True) == path
    assert model_name(Path("/models/a")) == "a"
