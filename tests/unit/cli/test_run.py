"""How a command's coroutine ends: by itself, by Ctrl-C, or by a signal of a scheduler."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from swerl.cli import _run

CLOSING = """
        print("closing", flush=True)
        await asyncio.sleep(300)
"""
COMMAND = """
import asyncio
import typer
from swerl.cli import _run
from swerl.cli._run import run

async def work() -> None:
    try:
        print("begun", flush=True)
        await asyncio.sleep(300)
    finally:
        await asyncio.sleep(0)
        print("closed", flush=True)

app = typer.Typer()
app.command()(lambda: run(work(), after="it goes on"))
app()
"""


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("together", [[signal.SIGINT], [signal.SIGTERM], list(CODES)])
def test_a_signal_closes_everything_and_says_what_comes_after(
    together: list[signal.Signals],
) -> None:
    command = started(COMMAND)
    for number in (signal.SIGSTOP, *together, signal.SIGCONT):
        command.send_signal(number)
    output, errors = command.communicate(timeout=60)
    assert command.returncode in [CODES[number] for number in together]
    assert output == "closed\n"
    first, last = errors.splitlines()
    assert first.startswith("stopping") and last == "interrupted: it goes on"


GRACE = """
asked = asyncio.Event()

async def work() -> None:
    try:
        print("begun", flush=True)
        await asked.wait()
        print("asked", flush=True)
        await asyncio.sleep(LAST_S)
        print("committed", flush=True)
    finally:
        print("closed", flush=True)

def command() -> None:
    grace = Grace(GRACE_S, asked.set)
    run(work(), after="it goes on", grace=grace)
    raise typer.Exit(143 * grace.is_asked)

app = typer.Typer()
app.command()(command)
app()
"""


@pytest.mark.parametrize(
    ("last_s", "grace_s", "num_signals", "output"),
    [
        (0.1, 60, 1, ["asked", "committed", "closed"]),
        (300, 0.1, 1, ["asked", "closed"]),
        (300, 60, 2, ["asked", "closed"]),
    ],
)
def test_sigterm_lets_the_work_end_within_a_grace(
    last_s: float, grace_s: float, num_signals: int, output: list[str]
) -> None:
    head = "import asyncio\nimport typer\nfrom swerl.cli._run import Grace, run\n"
    command = started(head + GRACE.replace("LAST_S", str(last_s)).replace("GRACE_S", str(grace_s)))
    command.send_signal(signal.SIGTERM)
    lines = [command.stdout.readline().rstrip()]
    if num_signals > 1:
        command.send_signal(signal.SIGTERM)
    rest, _ = command.communicate(timeout=60)
    assert (command.returncode, lines + rest.splitlines()) == (143, output)


def test_a_second_ctrl_c_does_not_wait_for_what_is_being_closed() -> None:
    command = started(COMMAND.replace("        await asyncio.sleep(0)\n", CLOSING.lstrip("\n")))
    command.send_signal(signal.SIGINT)
    assert command.stdout.readline() == "closing\n"
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert errors.splitlines()[-1] == "interrupted: it goes on"
    assert "Traceback" not in errors


def test_no_deadline_passes_while_the_process_is_stopped() -> None:
    wait = """
    async with asyncio.timeout(4):
        print("begun", flush=True)
        await asyncio.sleep(1)
    print("in time", flush=True)
"""
    begin, _, end = COMMAND.partition("    try:")
    command = started(begin + wait.lstrip("\n") + end[end.index("\napp =") :])
    command.send_signal(signal.SIGSTOP)
    time.sleep(6)
    command.send_signal(signal.SIGCONT)
    output, errors = command.communicate(timeout=60)
    assert (command.returncode, output) == (0, "in time\n"), errors


def test_ctrl_c_while_the_command_is_imported_is_no_error() -> None:
    script = """
import sys
import threading
from importlib.abc import MetaPathFinder
from swerl.__main__ import main

class Waiting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "swerl.cli.train_status":
            print("begun", flush=True)
            threading.Event().wait()

sys.meta_path.insert(0, Waiting())
sys.argv = ["swerl", "train", "status"]
main()
"""
    command = started(script)
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=60) == ("", "")
    assert command.returncode == 130


def started(script: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout and process.stdout.readline() == "begun\n"
    return process


def test_work_that_takes_a_while_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_run, "_PATIENCE_S", 0.0)
    with _run.waiting("downloading codex"):
        until = time.monotonic() + 20
        while "downloading codex" not in (seen := capsys.readouterr().err):
            assert time.monotonic() < until, seen
            time.sleep(0.01)


def test_a_pipe_gets_a_line_of_progress_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_run, "_LINE_S", -1.0)
    with _run.progress_bar("tasks", 2) as advance:
        advance(good=1)
        advance()
    assert capsys.readouterr().err == "  tasks 1 of 2\n  tasks 2 of 2\n"
