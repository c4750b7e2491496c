"""`swerl why`: the newest run, JSON, exit codes, bad input, and the lines at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli import why
from swerl.cli.main import typer_app
from swerl.core.errors import RunError
from swerl.recipe.schema import Recipe
from swerl.runs import history
from swerl.runs.history import RunHistory
from swerl.runs.layout import RunFolder, RunState
from swerl.view.site import Site
from tests.unit.runs._why_records import make_run


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(typer_app, ["why", *arguments])
    return done.exit_code, done.output


def test_the_cause_is_first_with_its_evidence_and_key(tmp_path: Path) -> None:
    sure = {"entropy": 0.01, "groups_with_signal": 0.0}
    make_run(tmp_path / "sick", metrics=lambda step: {"lr": 0.0, **(sure if step else {})})
    code, text = invoke("sick", "--runs", str(tmp_path))
    assert code == 1
    assert text.startswith("learning-rate: ")
    assert "change     trainer.lr: " in text
    assert text.index("learning-rate") < text.index("entropy-collapse")
    assert "2 findings in sick" in text


def test_json_has_every_finding(tmp_path: Path) -> None:
    root = make_run(tmp_path / "sick", metrics=lambda step: {"lr": 0.0})
    code, text = invoke(str(root), "--json")
    found = json.loads(text)
    assert code == 1
    assert found["findings"][0]["cause"] == "learning-rate"
    assert found["findings"][0]["key"] == "trainer.lr"
    assert found["steps"] == [0, 1, 2]


def test_a_run_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for arguments in (["--runs", str(tmp_path)], ["twin", "--runs", str(tmp_path)]):
        code, _ = invoke(*arguments)
        assert code == 1


def test_the_end_of_a_run_has_three_lines_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why.print_cause(make_run(tmp_path / "sick", metrics=lambda step: {"lr": 0.0}))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("why             learning-rate: ")
    fine = make_run(tmp_path / "fine")
    why.print_cause(fine)
    why.print_cause(tmp_path / "nothing")
    assert not capsys.readouterr().out
    why.print_cause(fine, says_healthy=True)
    assert "no fault found" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["finished", "stopped", "failed"])
def test_a_run_ends_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Only the trainer is left out: the run's records are there when the command comes to them."""

    async def train(recipe: Recipe, root: Path, show: object) -> RunHistory:
        make_run(root, metrics=lambda step: {"lr": 0.0})
        RunFolder(root).write_state(RunState(step=3, finished=end == "finished"))
        if end == "failed":
            raise RunError("an odd end")
        return history.read(RunFolder(root).events)

    monkeypatch.setattr("swerl.training.train.train", train)
    (tmp_path / "small.toml").write_text('name = "small"\n[tasks]\nnum_train = 8\n')
    arguments = ["train", str(tmp_path / "small.toml"), "--runs", str(tmp_path)]
    done = CliRunner().invoke(typer_app, arguments)
    assert isinstance(done.exception, RunError) is (end == "failed")
    assert "why             learning-rate: " in done.output


def test_the_page_of_a_run_shows_the_cause(tmp_path: Path) -> None:
    make_run(tmp_path / "sick", metrics=lambda step: {"lr": 0.0})
    make_run(tmp_path / "fine")
    site = Site(tmp_path)
    sick = site.page("r/sick/index.html").body.decode()
    assert "learning-rate" in sick
    assert "<code>trainer.lr</code>" in sick
    fine = site.page("r/fine/index.html").body.decode()
    assert "no fault found in the records of 3 steps, with the Episodes of steps 0, 1, 2" in fine
