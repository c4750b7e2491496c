"""A file without tasks is your input's error, whichever command it is given to."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.errors import TaskError

COMMANDS = (
    "images pull --dry-run {file}", "images pull {file}", "images mirror {file} --to 127.0.0.1:9/m",
    "images bake {file} --agent claude-code", "images gc --keep {file}",
    "sandbox smoke {file}", "rollout --tasks {file}",
    "tasks show {file}", "tasks filter {file} --sample 1 -o x",
    "convert {file} --format slime -o x", "convert {file} --format verl-parquet -o x",
)  # fmt: skip


def run(command: str, file: Path) -> None:
    words = [word.format(file=file) for word in command.split()]
    CliRunner().invoke(typer_app, words, catch_exceptions=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_file_without_tasks_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").touch()
    with pytest.raises(TaskError, match=r"tasks\.jsonl has no task") as caught:
        run(command, tmp_path / "tasks.jsonl")
    assert "swerl convert" in caught.value.hint


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="codec can't decode"):
        run("sandbox smoke {file}", tmp_path / "tasks.jsonl")
