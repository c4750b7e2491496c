"""`swerl tasks redteam` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.checks.redteam import repository, runner
from swerl.checks.redteam.policy import Defence, Policy
from swerl.cli.main import typer_app
from swerl.core.errors import UnknownNameError
from swerl.core.grade import Verdict
from swerl.runs.why import diagnose

FIXES = Policy(
    "fixes",
    "Fixes the till",
    (f"sed -i 's/{repository.WRONG}/{repository.RIGHT}/' till.py",),
    Defence.TESTS,
)


def invoke(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(typer_app, ["tasks", "redteam", *arguments])
    return result.exit_code, result.stdout, result.exception


def test_policies_are_listed_without_running_one() -> None:
    code, out, _ = invoke("--list")
    assert code == 0
    assert all(policy.name in out for policy in runner.all_policies())


def test_a_name_that_is_none_gets_the_nearest_ones() -> None:
    _, _, error = invoke("--only", "emty-patch")
    assert isinstance(error, UnknownNameError)
    assert "empty-patch" in error.hint


def test_a_policy_that_holds_ends_well(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    code, out, error = invoke("--only", "exit-at-import", "--json", "--naive", "-o", str(folder))
    assert code == 0, error
    [row] = json.loads(out)["policies"]
    assert diagnose(folder).read.startswith("1 Episode (1 cheat; most often: ")
    assert (row["result"], row["verdict"], row["reward"]) == ("held", "cheat", 0.0)
    assert row["rewarded_naively"] is True


@pytest.mark.parametrize("verdict", [Verdict.UNSOLVED, Verdict.SOLVED])
def test_a_policy_that_is_rewarded_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    fixes = Policy(FIXES.name, FIXES.sentence, FIXES.commands, FIXES.stopped_by, verdict)
    monkeypatch.setattr(runner, "all_policies", lambda: [fixes])
    code, out, _ = invoke()
    assert code == 1
    assert "BROKE" in out
