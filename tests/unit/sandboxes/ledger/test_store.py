"""Records survive `kill -9`, many writers at once, and a damaged file is one clear error."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from swerl.core.errors import RunError
from swerl.core.liveness import ProcessIdentity
from swerl.core.sandbox import Limits
from swerl.sandboxes.ledger import Entry, Ledger

from .conftest import Machines

RECORD = """
import sys, time
from pathlib import Path
from swerl.core.liveness import this_process
from swerl.sandboxes.ledger import Entry, Ledger

ledger, first = Ledger(Path(sys.argv[1])), int(sys.argv[2])
for number in range(first, first + int(sys.argv[3])):
    name = f"swerl-{number}"
    ledger.add(Entry(name, "folder", "{}", "r", this_process(), "img", 3.6, 60.0, time.time()))
    print(number, flush=True)
    ledger.set_opened(name, id="x")
    ledger.set_ended(name, why="closed")
"""


def recording(folder: Path, first: int, count: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", RECORD, str(folder), str(first), str(count)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_a_ledger_that_nobody_wrote_is_empty_and_stays_absent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.tidy()
    assert ledger.read() == [] and ledger.dollars("r") == 0.0
    assert not ledger.folder.exists()


def test_every_intent_survives_kill_9_of_its_process(tmp_path: Path) -> None:
    for first in (0, 100_000):
        with recording(tmp_path, first, 100_000) as process:
            assert process.stdout
            last = [int(process.stdout.readline()) for _ in range(30)][-1]
            process.kill()
            last = max([last, *(int(line) for line in process.stdout if line.endswith("\n"))])
        names = {entry.name for entry in Ledger(tmp_path).read()}
        assert {f"swerl-{number}" for number in range(first, last + 1)} <= names
        with closing(sqlite3.connect(Ledger(tmp_path).path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_many_processes_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    processes = [recording(folder, first * 1000, 20) for first in range(6)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    entries = Ledger(folder).read()
    assert len(entries) == 6 * 20
    assert all(entry.ended_s for entry in entries)
    assert folder.stat().st_mode & 0o77 == 0


async def test_an_intent_waits_for_another_writer_and_blocks_no_event_loop(
    ledger: Ledger, machines: Machines, dead: ProcessIdentity, write: Callable[..., Entry]
) -> None:
    write(dead)
    backend = machines.backend()

    async def use() -> None:
        async with backend.open("img", Limits(), workdir="/w"):
            pass

    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        waiting = asyncio.ensure_future(use())
        for _ in range(20):
            began_s = time.perf_counter()
            await asyncio.sleep(0.01)
            assert time.perf_counter() - began_s < 1.0
        assert machines.names() == []
        other.execute("COMMIT")
    await waiting
    assert [bool(entry.ended_s) for entry in ledger.read()] == [False, True]


def test_a_damaged_database_is_one_clear_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.path.write_bytes(b"\xff\x00[]\n3\n{}\n" * 1000)
    with pytest.raises(RunError, match="file is not a database") as caught:
        ledger.read()
    assert str(ledger.path) in str(caught.value)
    assert "move it away" in caught.value.hint
    ledger.tidy()
