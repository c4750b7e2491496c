"""Output on narrow terminals and after Ctrl-C."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from swerl.checks import smoke
from swerl.checks.doctor import Check
from swerl.checks.smoke import SmokeResult
from swerl.cli import _output, _run, doctor, sandbox_smoke
from swerl.cli.main import typer_app
from swerl.core.task import write_tasks
from swerl.tasks import twin


def test_doctor_breaks_no_word_at_forty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _output.stdout.cache_clear()
    doctor._show([Check("core packages", "ok", "all of them installed", "every command")], True)
    _output.stdout.cache_clear()
    words = capsys.readouterr().out.split()
    assert {"packages:", "installed;", "command"} <= set(words)


@pytest.mark.parametrize("width", [40, 120])
def test_a_narrow_terminal_cuts_the_words_of_a_progress_and_not_its_numbers(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    out = Console(width=width, file=file, force_terminal=True, color_system=None)
    monkeypatch.setattr(_run, "stderr", lambda: out)
    words = "of the boot: later history removed"
    with _run.waiting(words):
        pass
    waited = file.getvalue()
    with _run.progress_bar(words, 500, note="{task.fields[good]} good") as advance:
        advance(good=1)
    assert " 0:00:00" in waited
    assert " 1/500 0:00:00 1 good" in file.getvalue()


def test_an_interrupted_smoke_test_prints_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(tmp_path / "t.jsonl", twin.make_tasks(tmp_path, split="heldout", count=1, seed=0))

    def check(*_: object, on_done: object, **__: object) -> None:
        on_done(SmokeResult("image-one", "/repo", 1, ""))  # type: ignore[operator]

    def interrupted(*_: object, **__: object) -> None:
        raise typer.Exit(130)

    monkeypatch.setattr(smoke, "check", check)
    monkeypatch.setattr(sandbox_smoke, "run", interrupted)
    done = CliRunner().invoke(typer_app, ["sandbox", "smoke", str(tmp_path / "t.jsonl")])
    assert done.exit_code == 130
    assert "image-one" in done.stdout
