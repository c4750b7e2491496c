"""Codex: what it is started with, and what its end means. Its runs are in `test_runs.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from swerl.core.changes import FileEdit
from swerl.harnesses import codex
from swerl.harnesses.codex import Codex, Options

from .helpers import ended


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("Incomplete response returned, reason: max_output_tokens", True),
        ("Codex ran out of room in the model's context window.", True),
        ('{"error": {"code": "context_length_exceeded"}}', True),
        ("stream disconnected", False),
    ],
)
async def test_limits_are_told_from_breakdowns(said: str, limit: bool) -> None:
    failure = {"type": "turn.failed", "error": {"message": said}}
    done = await ended(Codex(Options(), ()), {"type": "turn.started"}, failure, exit_code=1)
    assert (done.code, done.limit) == (1, limit)


def test_an_old_release_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use 0\.99\.0 or newer"):
        Options(version="0.94.0")


def test_a_release_is_fetched_for_this_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for program in ("codex", "rg"):
        (tmp_path / "vendor" / "triple" / program).mkdir(parents=True)
        (tmp_path / "vendor" / "triple" / program / program).touch()
    asked = []

    def fetch(_: str, release: str, *, integrity: str | None, keep: str) -> Path:
        asked.append((release, bool(integrity)))
        return tmp_path

    monkeypatch.setattr(codex._bundles, "fetch", fetch)
    monkeypatch.setattr(codex._bundles.platform, "machine", lambda: "x86_64")
    codex.build(Options(version="0.169.0"))
    assert asked == [("0.169.0-linux-x64", True)]


@pytest.mark.parametrize("old", ["a.b\n", "x'\"$HOME\\`", ""])
def test_scripted_edits_keep_every_character(tmp_path: Path, old: str) -> None:
    new = "é \\1 $& 'quoted'\r\n"
    (tmp_path / "f").write_text(f"1{old}2{old}" if old else "", newline="")
    expected = f"1{new}2{old}" if old else new
    message, _ = Codex(Options(), ()).script([FileEdit("f", old, new)], str(tmp_path))
    command = str(message.tool_calls[0].arguments["cmd"])
    for without_python in (False, True):
        (tmp_path / "f").write_text(f"1{old}2{old}" if old else "", newline="")
        shell = command.replace("command -v python3", "false") if without_python else command
        subprocess.run(["sh", "-c", shell], check=True)
        assert (tmp_path / "f").read_bytes().decode() == expected
