"""The database of sandboxes: crashes, damage, many writers, its size, its file system."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import RunError
from swerl.core.liveness import ProcessIdentity, this_process
from swerl.sandboxes.ledger import store
from swerl.sandboxes.ledger.bill import bill
from swerl.sandboxes.ledger.store import Entry, Ledger, Use
from swerl.sandboxes.ledger.tracked import Recorder

USE = Use("folder", "{}", "r", this_process())
RECORD = """
import asyncio, sys
from pathlib import Path
from swerl.sandboxes.ledger.store import Ledger
from swerl.sandboxes.ledger.tracked import Recorder

async def record(first, count):
    recorder = Recorder(Ledger(Path(sys.argv[1])), "folder", "{}", run="r")
    for number in range(first, first + count):
        entry = await recorder.intend(f"swerl-{number}", "img", lifetime_s=60.0, price=3.6)
        print(number, flush=True)
        await recorder.opened(entry, id="x")
        await recorder.ended(entry.name, why="closed")

asyncio.run(record(int(sys.argv[2]), int(sys.argv[3])))
"""


def recorder(folder: Path, *, warn: Callable[[str], None] = lambda _: None) -> Recorder:
    return Recorder(Ledger(folder), "folder", "{}", run="r", warn=warn)


async def intend(of: Recorder, number: int, price: float = 3.6) -> Entry:
    return await of.intend(f"swerl-1-{number}", "img", lifetime_s=60.0, price=price)


async def live_and_end(of: Recorder, number: int) -> None:
    entry = await intend(of, number)
    await of.opened(entry, id="x")
    await of.ended(entry.name, why="closed")


def names(folder: Path) -> list[str]:
    return [entry.name for entry in Ledger(folder).read().entries]


def recording(folder: Path, first: int, count: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", RECORD, str(folder), str(first), str(count)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_a_ledger_that_nobody_wrote_is_empty_and_stays_absent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.read() == store.Contents([], [])
    assert bill(ledger).lines == ()
    ledger.tidy()
    assert not ledger.folder.exists()


def test_every_intent_survives_kill_9_of_its_process(tmp_path: Path) -> None:
    for first in (0, 100_000, 200_000):
        with recording(tmp_path, first, 100_000) as process:
            assert process.stdout
            last = [int(process.stdout.readline()) for _ in range(30)][-1]
            process.kill()
            last = max([last, *(int(line) for line in process.stdout if line.endswith("\n"))])
        assert {f"swerl-{number}" for number in range(first, last + 1)} <= set(names(tmp_path))
        with closing(Ledger(tmp_path).open()) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_many_processes_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    processes = [recording(folder, first * 1000, 60) for first in range(8)]
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert len(set(names(folder))) == 8 * 60
    assert all(entry.ended_s for entry in Ledger(folder).read().entries)
    (line,) = bill(Ledger(folder)).lines
    assert line.num_sandboxes == 8 * 60


async def test_an_intent_waits_for_another_writer_and_blocks_no_event_loop(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    await intend(ours, 1)
    with closing(Ledger(tmp_path).open()) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(intend(ours, 2))
        for _ in range(20):
            began_s = time.perf_counter()
            await asyncio.sleep(0.01)
            assert time.perf_counter() - began_s < 1.0
        assert not waiting.done()
        other.execute("COMMIT")
    await waiting
    assert names(tmp_path) == ["swerl-1-1", "swerl-1-2"]


async def test_an_intent_that_is_cancelled_while_it_waits_gets_its_end(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    await intend(ours, 1)
    with closing(Ledger(tmp_path).open()) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(intend(ours, 2))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        other.execute("COMMIT")
    ours.close()
    _, second = Ledger(tmp_path).read().entries
    assert (second.why, bool(second.ended_s)) == ("not created: cancelled", True)


def test_a_damaged_database_is_one_clear_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.path.write_bytes(b"\xff\x00[]\n3\n{}\n" * 1000)
    with pytest.raises(RunError, match="file is not a database") as caught:
        bill(ledger)
    assert str(ledger.path) in str(caught.value)
    assert "move it away" in caught.value.hint
    ledger.tidy()


def test_a_database_of_another_format_is_neither_read_nor_changed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with closing(ledger.open()) as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(RunError, match="format 2"):
        ledger.read()
    with pytest.raises(sqlite3.DatabaseError, match="format 2"):
        ledger.open()


async def test_a_deleted_database_comes_back_with_the_next_intent(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    first = await intend(ours, 1)
    for path in tmp_path.iterdir():
        path.unlink()
    await intend(ours, 2)
    await ours.opened(first, id="of the deleted one")
    (entry,) = Ledger(tmp_path).read().entries
    assert (entry.name, entry.id) == ("swerl-1-2", "")


async def test_the_first_end_counts(tmp_path: Path) -> None:
    ours = recorder(tmp_path)
    entry = await intend(ours, 1)
    await ours.ended(entry.name, why="reaped")
    await ours.ended(entry.name, why="closed")
    (entry,) = Ledger(tmp_path).read().entries
    assert entry.why == "reaped"


async def test_a_long_life_keeps_a_small_database_and_every_cent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = recorder(tmp_path)
    await ours.opened(await intend(ours, -1), id="open")
    monkeypatch.setattr(Ledger.tidy, "__kwdefaults__", {"keep": 100})
    for number in range(3000):
        await live_and_end(ours, number)
    ours.close()
    known = Ledger(tmp_path).read()
    assert Ledger(tmp_path).path.stat().st_size < 1_000_000
    open_ones = [entry for entry in known.entries if not entry.ended_s]
    assert [(entry.name, entry.id) for entry in open_ones] == [("swerl-1--1", "open")]
    num_ended = len(known.entries) - 1
    assert num_ended < 1200
    assert sum(each.num_sandboxes for each in known.sums) + num_ended == 3000


def test_adding_up_keeps_the_bill_and_all_that_is_not_over(
    ledger: Ledger, dead: ProcessIdentity, write: Callable[..., Entry]
) -> None:
    for _ in range(5):
        write(dead, opened_s=1e9, ended_s=1e9 + 3600, id="x", price=2.0)
    write(dead, opened_s=1e9)
    write(dead, intended_s=time.time(), ended_s=time.time(), price=1.0)  # may still appear
    write(replace(dead, place="000000"), opened_s=1e9, ended_s=1e9 + 1)
    before = bill(ledger)
    ledger.tidy(keep=0)
    assert len(ledger.read().entries) == 2
    assert bill(ledger).lines == before.lines
    assert sum(line.cost for line in before.lines) == pytest.approx(10.0)


def test_a_crash_while_adding_up_counts_nothing_twice(
    ledger: Ledger, dead: ProcessIdentity, write: Callable[..., Entry], monkeypatch: Any
) -> None:
    write(dead, opened_s=1e9, ended_s=1e9 + 3600, id="x", price=2.0)
    pid = os.fork()
    if pid == 0:  # ends as `kill -9` would, after the sums and before the commit
        connect = Ledger._connect

        def killed_at_delete(of: Ledger, how: str) -> sqlite3.Connection:
            db = connect(of, how)
            db.set_trace_callback(
                lambda done: os.kill(os.getpid(), signal.SIGKILL) if "DELETE" in done else None
            )
            return db

        monkeypatch.setattr(Ledger, "_connect", killed_at_delete)
        ledger.tidy(keep=0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (len(ledger.read().entries), ledger.read().sums) == (1, [])
    assert [line.cost for line in bill(ledger).lines] == [2.0]
    ledger.tidy(keep=0)
    ledger.tidy(keep=0)
    assert [line.cost for line in bill(ledger).lines] == [2.0]
    assert ledger.read().entries == []


def test_those_that_ended_last_are_kept_one_by_one(
    ledger: Ledger, dead: ProcessIdentity, write: Callable[..., Entry]
) -> None:
    old = write(dead, opened_s=1e9, ended_s=1e9 + 1)
    new = write(dead, opened_s=1e9, ended_s=1e9 + 2)
    ledger.tidy()
    assert [entry.name for entry in ledger.read().entries] == [old.name, new.name]
    ledger.tidy(keep=1)
    assert [entry.name for entry in ledger.read().entries] == [new.name]


def journal_mode(ledger: Ledger) -> str:
    with closing(ledger.open()) as db:
        (mode,) = db.execute("PRAGMA journal_mode").fetchone()
        return str(mode)


def test_a_local_ledger_uses_wal(tmp_path: Path) -> None:
    assert journal_mode(Ledger(tmp_path)) == "wal"
    assert Ledger(tmp_path).notices() == []


async def test_on_a_network_file_system_it_keeps_a_rollback_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path)
    ours = recorder(tmp_path)
    await live_and_end(ours, 1)
    ours.close()
    assert journal_mode(ledger) == "wal"
    monkeypatch.setattr(store, "_file_system", lambda _: "nfs4")  # as if it had been moved there
    await live_and_end(ours, 2)
    assert journal_mode(ledger) == "delete"
    assert names(tmp_path) == ["swerl-1-1", "swerl-1-2"]
    (notice,) = ledger.notices()
    assert "network file system (nfs4)" in notice
    assert "SWERL_STATE" in notice


async def test_a_file_system_without_wal_gets_a_rollback_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def without_shared_memory(target: str | Path, **options: Any) -> sqlite3.Connection:
        url = target if isinstance(target, str) else f"file:{target}?mode=rw"
        return connect(f"{url}&vfs=unix-dotfile", **{**options, "uri": True})

    monkeypatch.setattr(sqlite3, "connect", without_shared_memory)
    assert journal_mode(Ledger(tmp_path)) == "delete"
    ours = recorder(tmp_path)
    await live_and_end(ours, 1)
    assert names(tmp_path) == ["swerl-1-1"]
    ours.close()


def test_the_file_system_of_a_folder_is_found(tmp_path: Path) -> None:
    assert store._file_system(Path("/proc/self")) == "proc"
    assert store._file_system(tmp_path / "not" / "yet") == store._file_system(tmp_path)


def test_files_of_an_earlier_release_are_reported_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    for name in ("25049-90cf75.jsonl", "archive/sums.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (notice,) = Ledger(tmp_path).notices()
    assert notice.startswith(f"2 ledger files of an earlier release in {tmp_path} are not read")
    assert "swerl sandbox reap" in notice
    assert Ledger(tmp_path).read().entries == []
    assert len(list(tmp_path.rglob("*.jsonl"))) == 2


def test_a_read_only_ledger_can_be_read(ledger: Ledger, write: Callable[..., Entry]) -> None:
    entry = write(this_process())
    if os.geteuid() != 0:
        pytest.skip("mounting a folder read-only takes root")
    script = (
        "from swerl.sandboxes.ledger.store import default_ledger\n"
        "print(*(entry.name for entry in default_ledger().read().entries))\n"
    )
    mount = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3"'
    argv = ["unshare", "-m", "sh", "-c", mount, "sh", str(ledger.folder), sys.executable, script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "permission denied" in done.stderr.lower():
        pytest.skip(f"this machine forbids mounts: {done.stderr.strip()}")
    assert done.stdout.split() == [entry.name], done.stderr
