"""Who works on a run folder, how it ended, and how it is asked to end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swerl.core.errors import RunError, RunStoppedError, TrainerError
from swerl.runs import status
from swerl.runs.layout import RunFolder, State, open_run
from swerl.runs.status import (
    Ending,
    Standing,
    Stop,
    ask_to_stop,
    look,
    present,
    read_process,
    require_alone,
)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BEAT_S", 0.02)


def _ended(root: Path) -> tuple[Ending | None, str, str]:
    process = read_process(root)
    assert process is not None
    return process.ending, process.error, process.hint


async def test_a_run_that_is_done_is_finished(tmp_path: Path) -> None:
    with open_run(tmp_path, {}) as folder:
        async with present(tmp_path):
            assert look(tmp_path).standing is Standing.RUNNING
            folder.write_state(State(finished=True))
    assert look(tmp_path).standing is Standing.FINISHED


async def test_an_error_is_kept_with_its_hint_also_out_of_a_group(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup):
        async with present(tmp_path):
            raise ExceptionGroup("both", [TrainerError("it broke", hint="mend it")])
    assert _ended(tmp_path) == (Ending.FAILED, "it broke", "mend it")
    assert look(tmp_path).standing is Standing.FAILED


async def test_how_a_run_ended_is_known_also_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, value: object) -> None:
        raise RunError(f"cannot write {path}")

    with pytest.raises(KeyError):
        async with present(tmp_path):
            monkeypatch.setattr(status, "write_json", refuse)
            raise KeyError("a long reason" * 999)
    seen = look(tmp_path)
    assert seen.standing is Standing.FAILED
    assert seen.process and "a long reason" in seen.process.error


async def test_a_wish_to_stop_after_the_step_is_seen_and_forgotten(tmp_path: Path) -> None:
    async with present(tmp_path) as here:
        assert not here.stopping()
        ask_to_stop(tmp_path, Stop.STEP)
        assert here.stopping()
    assert look(tmp_path).standing is Standing.STOPPED
    async with present(tmp_path) as again:
        assert not again.stopping()


async def test_a_wish_to_stop_at_once_ends_what_waits(tmp_path: Path) -> None:
    with pytest.raises(RunStoppedError, match="asked to end"):
        async with asyncio.timeout(30), present(tmp_path):
            ask_to_stop(tmp_path, Stop.NOW)
            await asyncio.Event().wait()
    assert _ended(tmp_path)[0] is Ending.STOPPED


async def test_a_cancelled_run_is_interrupted(tmp_path: Path) -> None:
    async def work() -> None:
        async with present(tmp_path):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _ended(tmp_path)[0] is Ending.INTERRUPTED


HOLDER = """
import asyncio, sys
from pathlib import Path
from swerl.runs.layout import open_run
from swerl.runs.status import present

async def main() -> None:
    async with present(Path(sys.argv[1])):
        print("here", flush=True)
        await asyncio.sleep(300)

with open_run(Path(sys.argv[1]), {}):
    asyncio.run(main())
"""


def test_a_killed_process_is_told_from_one_that_runs_and_from_a_copy(tmp_path: Path) -> None:
    root, copy, moved = tmp_path / "run", tmp_path / "copy", tmp_path / "moved"
    root.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout and holder.stdout.readline() == "here\n"
    seen = look(root)
    assert seen.standing is Standing.RUNNING
    assert seen.process and seen.process.pid == holder.pid
    with pytest.raises(RunError, match="another process"), open_run(root, {}):
        pass
    with pytest.raises(RunError, match=rf"process {holder.pid} on .*, since \d+") as error:
        asyncio.run(require_alone(root, tell=print))
    assert f"swerl train stop {root}" in error.value.hint
    shutil.copytree(root, copy)
    assert look(copy).standing is Standing.COPIED
    asyncio.run(require_alone(copy, tell=print))
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert look(root).standing is Standing.KILLED
    root.rename(moved)
    assert look(moved).standing is Standing.KILLED
    holder.stdout.close()


async def test_another_machines_process_is_known_by_its_heartbeat(tmp_path: Path) -> None:
    async with present(tmp_path):
        pass
    path = tmp_path / "process.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "host": "elsewhere", "ending": None, "ended": 0}))
    (tmp_path / "heartbeat").touch()
    assert look(tmp_path, patience_s=0).standing is Standing.RUNNING
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            (tmp_path / "heartbeat").touch()

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(RunError, match="on elsewhere"):
        await require_alone(tmp_path, tell=print)
    over.set()
    beating.join()
    os.utime(tmp_path / "heartbeat", (1, 1))
    told_of: list[str] = []
    assert look(tmp_path, patience_s=0, tell=told_of.append).standing is Standing.SILENT
    assert not told_of
    assert look(tmp_path, patience_s=0.01, tell=told_of.append).standing is Standing.SILENT
    assert "on elsewhere gave its last sign" in told_of[0]
    await require_alone(tmp_path, tell=told_of.append)
    assert len(told_of) == 1


async def test_a_machine_that_went_a_moment_ago_is_waited_for_and_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SILENT_S", 0.5)
    async with present(tmp_path):
        pass
    path = tmp_path / "process.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "host": "elsewhere", "ending": None, "ended": 0}))
    (tmp_path / "heartbeat").touch()
    told_of: list[str] = []
    await require_alone(tmp_path, tell=told_of.append)
    assert told_of[0].endswith("0 s ago; waiting up to 0 s for another one")
    assert look(tmp_path, patience_s=0).standing is Standing.SILENT


def test_a_damaged_process_file_is_one_clear_error(tmp_path: Path) -> None:
    RunFolder(tmp_path)
    (tmp_path / "process.json").write_text('{"pid": 1}')
    with pytest.raises(RunError, match="damaged"):
        look(tmp_path)
