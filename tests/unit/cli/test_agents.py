"""`swerl agents fetch` as a user types it."""

from __future__ import annotations

import pytest

from swerl.cli.main import app


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command as the shell does and return its exit code."""
    monkeypatch.setattr("sys.argv", ["swerl", "agents", "fetch", *words])
    with pytest.raises(SystemExit) as ended:
        app()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("version", ["newest", "2", "2.1", "v2.1.112", "../2.1.112", "2.1.112 "])
@pytest.mark.parametrize(
    "agent", ["claude-code", "codex", "mini-swe-agent", "opencode", "pi", "qwen-code"]
)
def test_what_is_no_release_is_refused_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], agent: str, version: str
) -> None:
    monkeypatch.setenv("PATH", "")

    assert run(monkeypatch, agent, "--version", version) == 2

    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"error: --version {version!r} is not a release of {agent}"
    assert told[1].startswith("hint:  give the exact version, such as ")


def test_a_release_that_cannot_be_run_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")

    assert run(monkeypatch, "mini-swe-agent", "--version", "1.17.5") == 2

    assert "1.17.5 has no tool calls" in capsys.readouterr().err


def test_an_agent_of_swerls_own_needs_no_fetching(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "builtin") == 0
    assert "nothing to fetch" in capsys.readouterr().out


def test_an_unknown_agent_is_one_error_that_names_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "codx") == 2
    assert "codex" in capsys.readouterr().err
