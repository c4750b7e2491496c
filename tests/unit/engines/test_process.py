"""A server's processes end with it and with its controller, whatever they did to get away.

The server is a stand-in: a program that begins children as SGLang does while it starts, and one
that leaves its session, as no engine does yet.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swerl.core.errors import EngineError
from swerl.engines import _process
from swerl.engines._process import child, how_ended, until_ready
from tests.unit.engines._launched import until

STARTING = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def begin(name, *, leaves):
    if os.fork():
        return
    if leaves:
        os.setsid()
        if os.fork():
            os._exit(0)
    (folder / f"{name}.part").write_text(str(os.getpid()))
    (folder / f"{name}.part").rename(folder / f"{name}.pid")
    time.sleep(600)
    os._exit(0)
begin("worker", leaves=False)
begin("daemon", leaves=True)
(folder / "server.part").write_text(str(os.getpid()))
(folder / "server.part").rename(folder / "server.pid")
"""
"""Begins a child and a daemon, and writes their ids."""
NAMES = ("server", "worker", "daemon")
STAYS = STARTING + "time.sleep(600)\n"
CRASHES = (
    STARTING
    + """
while len(list(folder.glob("*.pid"))) < 3:
    time.sleep(0.01)
sys.exit(7)
"""
)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS
CONTROLLER = """
import asyncio, sys
from pathlib import Path
from swerl.engines._process import child
async def main():
    async with child([sys.executable, "-c", *sys.argv[1:]], Path(sys.argv[2]) / "log"):
        await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for the processes' ids; what a failed test leaves is killed."""
    yield tmp_path
    for file in tmp_path.glob("*.pid"):
        if is_alive(int(file.read_text())):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_controller_killed_while_its_server_starts_leaves_nothing(
    folder: Path, number: signal.Signals
) -> None:
    controller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONTROLLER, STAYS, str(folder)
    )
    pids = await begun(folder)
    controller.send_signal(number)
    await controller.wait()
    await until(lambda: not any(map(is_alive, pids)), limit_s=30)


@pytest.mark.parametrize("program", [STAYS, STUBBORN])
async def test_leaving_the_context_ends_every_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(_process, "STOP_S", 0.5)
    async with child(command(program, folder), folder / "log"):
        pids = await begun(folder)
    await until(lambda: not any(map(is_alive, pids)), limit_s=30)


async def test_a_server_that_ends_takes_its_children_with_it(folder: Path) -> None:
    async with child(command(CRASHES, folder), folder / "log") as process:
        pids = await begun(folder)
        assert await process.wait() == 7
        await until(lambda: not any(map(is_alive, pids)), limit_s=30)


async def test_a_command_that_is_missing_is_named(folder: Path) -> None:
    async def never() -> None:
        return None

    log = folder / "log"
    async with child(["/no/such/server"], log) as process:
        with pytest.raises(EngineError, match="/no/such/server"):
            await until_ready(never, process, log, timeout_s=60)


def command(program: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", program, str(folder)]


async def begun(folder: Path) -> list[int]:
    """Wait until all three processes are there, and return their ids."""
    for name in NAMES:
        await until((folder / f"{name}.pid").exists)
    return [int((folder / f"{name}.pid").read_text()) for name in NAMES]


def is_alive(pid: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("code", "described"),
    [
        (0, "exit code 0"),
        (-9, "killed by SIGKILL"),
        (137, "killed by SIGKILL"),
        (139, "killed by SIGSEGV"),
        (255, "exit code 255"),
    ],
)
def test_an_exit_code_is_described_by_its_signal(code: int, described: str) -> None:
    assert how_ended(code) == described
