"""`swerl images pull`, `ls` and `gc` as a user types them."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from swerl.cli.images import images_of
from swerl.cli.main import typer_app
from swerl.core.errors import ImageError, InputError, TaskError
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.images.store import Store, default_store
from tests.services.image import BaseImage
from tests.unit.images.layers import Entry, add_image


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return default_store()


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    spec = GradingSpec(grader="command")
    names = ("127.0.0.1:9/swe/a", "host", "127.0.0.1:9/swe/b", "127.0.0.1:9/swe/a")
    found = [Task(f"t{n}", "o/r", name, "/r", "fix", spec) for n, name in enumerate(names)]
    write_tasks(tmp_path / "tasks.jsonl", found)
    return str(tmp_path / "tasks.jsonl")


class Nothing(BaseHTTPRequestHandler):
    """Answers that there is nothing."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing: the command under test owns the output."""


@pytest.fixture
def empty_registry() -> Iterator[str]:
    """A registry that has nothing."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def images(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(typer_app, ["images", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_images_are_those_of_task_files_and_those_named(tasks: str) -> None:
    found = images_of(["swe/c", tasks])
    assert found == ["swe/c", "127.0.0.1:9/swe/a", "host", "127.0.0.1:9/swe/b"]
    with pytest.raises(TaskError, match="cannot read task file"):
        images_of(["none.jsonl"])
    with pytest.raises(InputError, match="is not an image name"):
        images_of(["Not A Name"])


def test_failed_pull_tells_what_to_do(store: Store, empty_registry: str) -> None:
    add_image(store, f"{empty_registry}/swe/a:latest", [Entry("a")])
    out = images("pull", f"{empty_registry}/swe/a", f"{empty_registry}/swe/b", code=1)
    assert "1 image ready (1 already there), 1 failed" in out
    assert "next: run the same command again" in out


def test_import_then_list_then_free(store: Store, base_image: BaseImage) -> None:
    archive = f"oci-archive:{base_image.layout}:swe/root"
    assert "docker.io/swe/root:latest" in images("pull", archive)
    assert "docker.io/swe/root:latest" in images("ls")
    assert "would be freed" in images("gc", "--keep", "host", "--dry-run")
    assert store.find("swe/root")
    assert "docker.io/swe/root:latest" in images("gc", "--keep", "host")
    assert "0 images" in images("ls")


def test_commands_work_before_there_is_a_store(store: Store) -> None:
    assert "next: swerl images pull TASKS" in images("ls")
    assert "0 images" in images("gc", "--keep", "host")


def test_file_without_tasks_frees_nothing(store: Store, tmp_path: Path) -> None:
    add_image(store, "docker.io/swe/task:latest", [Entry("a")])
    (tmp_path / "tasks.jsonl").touch()
    with pytest.raises(TaskError, match="has no task"):
        images("gc", "--keep", str(tmp_path / "tasks.jsonl"))
    assert store.find("swe/task")


@pytest.mark.parametrize("name", ["taks", "taks.jsonl", "./tasks", "taks.json"])
def test_mistyped_file_name_frees_nothing(store: Store, name: str) -> None:
    add_image(store, "docker.io/swe/task:latest", [Entry("a")])
    with pytest.raises((TaskError, ImageError)):
        images("gc", "--keep", name)
    assert store.find("swe/task")
