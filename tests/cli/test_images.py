"""`swerl images mirror` as a user types it, against a registry that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.images import app
from swerl.core.errors import ImageError, InputError
from swerl.core.task import GradingSpec, Task, write_tasks


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    spec = GradingSpec(grader="command")
    names = ("host", "built:a")
    found = [Task(f"t{n}", "o/r", name, "/r", "fix", spec) for n, name in enumerate(names)]
    write_tasks(tmp_path / "tasks.jsonl", found)
    return tmp_path / "tasks.jsonl"


def mirror(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["mirror", *arguments], catch_exceptions=False)
    return result.output


def test_unreachable_target_is_one_clear_error(tasks: Path) -> None:
    with pytest.raises(ImageError, match=r"registry 127\.0\.0\.1:9 does not answer") as caught:
        mirror(str(tasks), "--to", "127.0.0.1:9/m")
    assert caught.value.hint


def test_target_without_a_host_is_your_input(tasks: Path) -> None:
    with pytest.raises(InputError, match="is not a registry with an optional prefix"):
        mirror(str(tasks), "--to", "mirror")


def test_from_without_two_sides_is_your_input(tasks: Path) -> None:
    with pytest.raises(InputError, match="is not OLD=NEW"):
        mirror(str(tasks), "--to", "127.0.0.1:9/m", "--from", "docker.io")
