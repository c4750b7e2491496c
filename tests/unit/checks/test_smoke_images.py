"""`swerl sandbox smoke` over real images: of a daemon, and of a registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.task import GradingSpec, Task, write_tasks


def smoke(folder: Path, image: str, *words: str) -> dict[str, object]:
    spec = GradingSpec("command", test_command="python3 -m pytest")
    write_tasks(folder / "tasks.jsonl", [Task("a", "r", image, "/testbed", "fix", spec)])
    command = ["sandbox", "smoke", str(folder / "tasks.jsonl"), "--json", *words]
    done = CliRunner().invoke(typer_app, command)
    (row,) = json.loads(done.stdout)
    assert isinstance(row, dict)
    return row


def test_an_image_of_a_daemon(dockerd: str, docker_image: str, tmp_path: Path) -> None:
    row = smoke(
        tmp_path, docker_image, "--backend", "docker", "--set", f"sandbox.base_url={dockerd}"
    )
    assert (
        row["failure"] == "the workdir is not the top of a git work tree (give the folder of "
        "the repository as the Task's workdir)"
    )


def test_an_image_that_is_pulled_first(
    pushed_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    row = smoke(tmp_path, pushed_image, "--backend", "local")
    assert float(str(row["boot_s"])) > 0, row
    absent = smoke(tmp_path, pushed_image.replace(":1", ":none"), "--backend", "local")
    assert "none" in str(absent["failure"])
    assert absent["ok"] is False
