"""Upload a folder and a task file to a stand-in of the hub, which keeps its HTTP contract."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swerl.core.errors import InputError
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.recipe.hub import require_id
from swerl.tasks.export import task_card

from .fake_hub import Hub, serve

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve("me/new", {}) as server:
        yield server


def pushing(
    hub: Hub, home: Path, *words: str, token: str = "hf_writer"
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, as huggingface-hub reads its settings on import."""
    # Its other way for large files speaks with servers of the vendor.
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_TOKEN": token,
           "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


PUSH = """
import sys
from pathlib import Path
from swerl.core.errors import InputError
from swerl.recipe.hub import push
try:
    print(push(Path(sys.argv[1]), sys.argv[2], kind="model"))
except InputError as error:
    print(f"{error} hint: {error.hint}")
"""


def test_a_model_folder_is_uploaded_whole_to_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    files = {"config.json": b"{}", "model.safetensors": b"w" * 5000, "README.md": b"# Card\n"}
    for name, data in files.items():
        (model / name).write_bytes(data)
    done = pushing(hub, tmp_path / "hf", "-c", PUSH, str(model), "me/model")
    assert done.stdout.strip() == f"{hub.url}/me/model", done.stderr
    assert hub.files == files
    assert hub.created[0]["visibility"] == "private"


def test_a_refusal_says_what_to_do_and_that_nothing_is_lost(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    done = pushing(hub, tmp_path / "hf", "-c", PUSH, str(tmp_path), "me/model", token="hf_other")
    assert "the hub does not take me/model" in done.stdout and "401" in done.stdout
    assert "hf auth login" in done.stdout
    assert not hub.files


def test_a_task_file_is_uploaded_with_its_card(hub: Hub, tmp_path: Path) -> None:
    spec = GradingSpec("swebench", fail_to_pass=("t",))
    tasks = [Task(f"a-{n}", f"e/r{n % 2}", "dir:/x", "/r", "Fix.", spec) for n in range(3)]
    file = tmp_path / "tasks.jsonl"
    write_tasks(file, tasks)
    words = ("-m", "swerl", "convert", str(file), "--push", "me/tasks")
    done = pushing(hub, tmp_path / "hf", *words)
    assert done.returncode == 0 and f"{hub.url}/datasets/me/tasks" in done.stdout, done.stderr
    assert hub.files["tasks.jsonl"] == file.read_bytes()
    assert hub.files["README.md"].decode() == task_card(tasks)
    assert "3 Tasks of 2 repositories" in task_card(tasks)
    assert "Certified by `swerl tasks vet`: 0" in task_card(tasks)


@pytest.mark.parametrize("name", ["model", "me/model@main", "me/mo del", ""])
def test_what_is_no_id_is_refused_before_anything_is_written(name: str) -> None:
    with pytest.raises(InputError, match="is not the id of a repository"):
        require_id(name)
