"""The doctor tries things for real, names a fix for each missing part, and never shows a secret."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from swerl.checks import doctor
from swerl.checks.doctor import Check, State, twin_runs
from swerl.cli.doctor import doctor as command

SECRET = "sk-this-must-never-be-shown"


@pytest.fixture(scope="module")
def checks() -> list[Check]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", SECRET)
        return asyncio.run(doctor.examine(Path("runs")))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def call(found: list[Check], *arguments: str) -> Result:
        async def examine(_: Path) -> list[Check]:
            return found

        monkeypatch.setattr("swerl.cli.doctor.examine", examine)
        app = typer.Typer()
        app.command()(command)
        return CliRunner().invoke(app, arguments)

    return call


def test_every_failed_check_names_its_features_and_a_fix(checks: list[Check]) -> None:
    assert len({check.name for check in checks}) == len(checks) > 15
    for check in checks:
        assert check.detail
        assert check.enables
        assert check.state is State.OK or check.fix or check.name == "GPUs"


def test_sandbox_and_trainer_are_tried_for_real(checks: list[Check]) -> None:
    by_name = {check.name: check for check in checks}
    if by_name["local sandbox"].state is State.OK:
        assert "git ran in it" in by_name["local sandbox"].detail
    if by_name["trainer"].state is State.OK:
        assert "megatron-core 0." in by_name["trainer"].detail


def test_key_is_reported_and_never_shown(checks: list[Check]) -> None:
    by_name = {check.name: check for check in checks}
    assert by_name["HF_TOKEN"].detail == "set"
    assert SECRET not in repr(checks)


async def test_machine_without_git_cannot_run_the_twin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = await doctor._git()
    assert (found.state, found.fix) == (State.MISSING, "apt-get install -y git")
    assert not twin_runs([found])


async def test_program_that_hangs_counts_as_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    assert await doctor._output(str(program), timeout_s=0.05) == ""


async def test_broken_installation_of_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH", "raise ImportError")
    found = await doctor._trainer()
    assert found.state is State.MISSING
    assert "[twin]" in found.fix


async def test_absent_docker_is_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    found = await doctor._docker()
    assert found.state is State.WARN
    assert twin_runs([found])


def test_full_disk_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_DISK_GIB", 1e9)
    assert doctor._disk(tmp_path / "not" / "there" / "yet").state is State.MISSING


def test_exit_code_is_1_if_the_twin_cannot_run(run: Callable[..., Result]) -> None:
    good = Check("git", State.OK, "2.39", "patches")
    warned = Check("docker", State.WARN, "no daemon", "images", "apt-get install -y docker.io")
    broken = Check("git", State.MISSING, "not installed", "patches", "apt-get install -y git")
    assert run([good, warned]).exit_code == 0
    assert run([broken]).exit_code == 1


def test_table_shows_the_fix_in_full_and_json_is_json(run: Callable[..., Result]) -> None:
    fix = "apt-get install -y " + "very-long-package-name " * 8
    broken = Check("git", State.MISSING, "not [installed]", "patches", fix.strip())
    shown = run([broken])
    assert fix.strip() in shown.output
    assert "not [installed]" in " ".join(shown.output.split())
    answer = json.loads(run([broken], "--json").output)
    assert answer["twin_runs"] is False
    assert answer["checks"][0]["state"] == "missing"
