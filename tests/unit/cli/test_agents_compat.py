"""`swerl agents compat` and `replay` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swerl.cli.main import app


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")


def run(monkeypatch: pytest.MonkeyPatch, *words: str, command: str = "compat") -> int:
    """Run the command as the shell does and return its exit code."""
    monkeypatch.setattr("sys.argv", ["swerl", "agents", command, *words])
    with pytest.raises(SystemExit) as ended:
        app()
    return int(ended.value.code or 0)


def test_a_report_is_printed_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "compat.json"
    words = ["--agents", "builtin", "--cases", "tools,compaction", "-o", str(out)]
    assert run(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    assert "2 trials, 0 failed" in printed
    assert "it has no compaction" in printed
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"], row["outcome"] == "done") for row in rows] == [
        ("tools", True),
        ("compaction", False),
    ]


def test_a_failed_trial_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("swerl.checks.compat.trial._ALL_TRAINED", 1.1)
    assert run(monkeypatch, "--agents", "builtin", "--cases", "tools") == 1
    assert "only 100.0% of the sampled tokens are trained" in capsys.readouterr().out


def test_a_failed_trial_that_replays_is_printed_and_kept_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("swerl.checks.compat.trial._ALL_TRAINED", 1.1)
    out = tmp_path / "replay.md"
    words = ["--agents", "builtin", "--cases", "tools", "-o", str(out)]
    assert run(monkeypatch, *words, command="replay") == 1
    printed = capsys.readouterr().out
    assert "4 of 4 turns replay: 100 %." in printed
    for text in (printed, out.read_text()):
        assert "failed: builtin: only 100.0% of the sampled tokens are trained (tools)" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--agents", "codx"], "codex"),
        (["--agents", "codex@newest"], "release"),
        (["--agents", "builtin@1.0"], "release"),
        (["--cases", "compation"], "compaction"),
        (["--families", "qwen33"], "qwen3"),
        (["-o", "report.txt"], ".md or .json"),
        (["-o", "absent/report.md"], "no folder"),
        (["--models", "absent"], "no folder"),
    ],
)
def test_wrong_input_starts_nothing_and_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    assert run(monkeypatch, "--list", *words) == 2
    assert told in capsys.readouterr().err


def test_the_list_names_cases_and_agents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--list") == 0
    printed = capsys.readouterr().out
    assert "over-long" in printed
    assert "claude-code 2.1.112" in printed
