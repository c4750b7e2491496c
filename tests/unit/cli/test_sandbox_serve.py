"""`swerl sandbox serve` as a user runs it: what it prints, refuses, and leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2b import Sandbox
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from tests.unit.sandboxes.e2b_server.helpers import eventually

from ..sandboxes.helpers import host_processes


@contextmanager
def serve(*options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Start the command and read the variables that it tells to export."""
    argv = [sys.executable, "-m", "swerl", "sandbox", "serve", "--listen", "127.0.0.1:0", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(argv, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        pairs = [re.fullmatch(r"export (\w+)=(.*)\n", line) for line in lines]
        assert all(pairs), lines
        yield process, {pair[1]: pair[2] for pair in pairs if pair}
    finally:
        process.kill()
        process.communicate()


def connect(told: dict[str, str], key: str = "") -> dict[str, str]:
    return {
        "api_url": told["E2B_API_URL"],
        "sandbox_url": told["E2B_SANDBOX_URL"],
        "api_key": key or told["E2B_API_KEY"],
    }


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(how: signal.Signals) -> None:
    mark = f"98{how.value}.25"
    with serve() as (process, told):
        sandbox = Sandbox.create(**connect(told))
        sandbox.commands.run(f"sleep {mark}", background=True)
        eventually(lambda: host_processes(mark))
        process.send_signal(how)
        process.wait(20)
        eventually(lambda: not host_processes(mark))
        expected = {signal.SIGINT: 130, signal.SIGTERM: 0, signal.SIGKILL: -9}
        assert process.returncode == expected[how]


def test_a_key_of_ones_own_is_used_and_never_printed(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("e2b_my-very-own-key\n")
    options = (
        "--api-key-file",
        str(key_file),
        "--template",
        "mine=host",
        "--set",
        "limits.memory_mib=300",
    )
    with serve(*options) as (process, told):
        sandbox = Sandbox.create("mine", **connect(told, key="e2b_my-very-own-key"))
        assert sandbox.get_info().memory_mb == 300
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert told["E2B_API_KEY"] == f'"$(cat {key_file})"'
    assert "my-very-own-key" not in out + err


def test_an_address_that_others_reach_needs_a_key_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("e2b_my-very-own-key\n")
    with serve("--api-key-file", str(tmp_path / "key"), "--listen", "0.0.0.0:0") as (process, told):
        process.terminate()
    assert told["E2B_API_URL"].startswith("http://0.0.0.0:")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0"], "--api-key-file"),
        (["--listen", "ftp://0.0.0.0:0"], "HOST:PORT"),
        (["--listen", "0.0.0.0"], "HOST:PORT"),
        (["--listen", "https://127.0.0.1:0"], "proxy"),
        (["--template", "nothing"], "NAME=IMAGE"),
        (["--api-key-file", "/no/such/file"], "cannot read the key"),
        (["--backend", "lokal"], "local"),
        (["--set", "sandbox.scrach=/x"], "scratch"),
        (["--set", "scratch=/x"], "sandbox.scratch"),
    ],
)
def test_bad_input_is_one_error_and_a_hint(options: Sequence[str], words: str) -> None:
    result = CliRunner().invoke(typer_app, ["sandbox", "serve", *options])
    said = f"{result.output}{result.exception}{getattr(result.exception, 'hint', '')}"
    assert result.exit_code != 0
    assert words in said, said


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("short")
    command = ["sandbox", "serve", "--api-key-file", os.fspath(tmp_path / "key")]
    result = CliRunner().invoke(typer_app, command)
    assert result.exit_code != 0
    assert "16" in f"{result.output}{result.exception}"
