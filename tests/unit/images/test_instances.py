"""The real instances that come with swerl: specs without data, and one command to a verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.errors import ImageError
from swerl.images import build

NAME = "pallets__flask-4045"
DATA = {"problem_statement", "patch", "test_patch", "hints_text", "FAIL_TO_PASS", "PASS_TO_PASS"}


def swerl(*arguments: object) -> object:
    words = [str(each) for each in arguments]
    return CliRunner().invoke(typer_app, words, catch_exceptions=False)


@pytest.mark.parametrize("spec", build.shipped().values(), ids=build.shipped())
def test_an_environment_is_pinned_whole(spec: build.SourceSpec) -> None:
    assert spec.frozen and spec.sha256 and spec.dataset and spec.split
    assert all(pin.count("==") == 1 for pin in spec.pins)


def test_a_file_without_the_row_is_two_lines(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instance_id": "a__b-1"}\n')
    done = subprocess.run(
        [sys.executable, "-m", "swerl.cli", "rollout", "--instance", NAME, "--tasks", str(rows)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    _, error, hint = done.stderr.splitlines()
    assert NAME in error
    assert "--tasks" in hint


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a-1.tar.gz"
    archive.write_bytes(b"other")
    with pytest.raises(ImageError, match="another checksum"):
        build._check_sum(archive, "0" * 64)


@pytest.mark.integration
def test_one_command_takes_a_row_to_its_verdict(shared_dir: Path, tmp_path: Path) -> None:
    rows = shared_dir / "instances" / "rows.jsonl"
    words = ["rollout", "--instance", NAME, "--tasks", rows, "--json"]
    for script, verdict in (("gold", "solved"), ("noop", "unsolved")):
        done = subprocess.run(
            [sys.executable, "-m", "swerl.cli", *map(str, words), "--engine", f"scripted:{script}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if any(reason in done.stderr for reason in ("no Python", "cannot fetch", "bubblewrap")):
            pytest.skip(done.stderr.strip())
        assert json.loads(done.stdout)["verdict"] == verdict, done.stderr
