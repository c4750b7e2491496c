"""`swerl sandbox attacks` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swerl.cli.main import typer_app
from swerl.core.errors import InputError, UnknownNameError

FAST = ("--only", "capabilities", "--only", "host-files", "--only", "routes")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWERL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "state"


def attacks(*arguments: str) -> Result:
    return CliRunner().invoke(typer_app, ["sandbox", "attacks", *arguments], catch_exceptions=False)


def test_a_report_is_printed_and_kept(state: Path) -> None:
    done = attacks(*FAST)
    assert done.exit_code == 0, done.output
    assert "3 PASS, 0 FAIL, 0 CANNOT" in done.output
    [kept] = (state / "probes").iterdir()
    assert [row["name"] for row in json.loads(kept.read_text())["probes"]] == [
        "routes", "host-files", "capabilities",
    ]  # fmt: skip


def test_a_run_keeps_its_report(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    assert attacks(*FAST, "--run", str(run), "--set", "sandbox.isolator=unshare").exit_code == 0
    body = json.loads((run / "probe.json").read_text())
    assert body["options"]["isolator"] == "unshare"


def test_json_is_the_kept_report(tmp_path: Path) -> None:
    done = attacks(*FAST, "--json", "--out", str(tmp_path / "sheet.json"))
    assert json.loads(done.stdout) == json.loads((tmp_path / "sheet.json").read_text())


def test_the_list_names_every_attack_and_runs_none(state: Path) -> None:
    done = attacks("--list")
    names = [line.split()[0] for line in done.output.splitlines() if line.strip()]
    assert len(names) > 40
    assert {"fork-bomb", "cloud-metadata", "engine-admin"} <= set(names)
    assert not state.exists()


def test_a_wrong_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as raised:
        attacks("--only", "fork-bom")
    assert "fork-bomb" in raised.value.hint


def test_a_run_that_is_not_there_is_your_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run folder"):
        attacks(*FAST, "--run", str(tmp_path / "none"))


def test_an_attack_that_works_is_exit_code_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from swerl.checks.attacks import runner
    from swerl.checks.attacks.attack import AttackContext, AttackFinding, attack, failed

    @attack("Walks through an open door.")
    async def open_door(ctx: AttackContext) -> AttackFinding:
        return failed("it stood open")

    monkeypatch.setattr(runner, "choose", lambda names: [open_door])
    done = attacks()
    assert done.exit_code == 1
    assert "it stood open" in done.output
