"""How a command's coroutine ends: by itself, by Ctrl-C, or by a signal of a scheduler."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

COMMAND = """
import asyncio
import typer
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_closes_everything_and_says_what_comes_after(
    number: signal.Signals, code: int
) -> None:
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout and command.stdout.readline() == "begun\n"
    command.send_signal(number)
    output, errors = command.communicate(timeout=60)
    assert (command.returncode, output) == (code, "closed\n")
    assert "interrupted: it goes on" in errors
    assert "Traceback" not in errors
