"""The owner of a run folder, its end, and stop requests."""

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
from swerl.runs.layout import RunFolder, RunState, open_run
from swerl.runs.status import (
    Ending,
    RunStatus,
    StopRequest,
    own_run,
    read_process,
    request_stop,
    require_unused,
    run_status,
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
        async with own_run(tmp_path):
            assert run_status(tmp_path).status is RunStatus.RUNNING
            folder.write_state(RunState(finished=True))
    assert run_status(tmp_path).status is RunStatus.FINISHED


async def test_an_error_is_kept_with_its_hint_also_out_of_a_group(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup):
        async with own_run(tmp_path):
            raise ExceptionGroup("both", [TrainerError("it broke", hint="fix it")])
    assert _ended(tmp_path) == (Ending.FAILED, "it broke", "fix it")
    assert run_status(tmp_path).status is RunStatus.FAILED


async def test_the_end_of_a_run_is_recorded_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, value: object) -> None:
        raise RunError(f"cannot write {path}")

    with pytest.raises(KeyError):
        async with own_run(tmp_path):
            monkeypatch.setattr(status, "write_json", refuse)
            raise KeyError("a long reason" * 999)
    seen = run_status(tmp_path)
    assert seen.status is RunStatus.FAILED
    assert seen.process and "a long reason" in seen.process.error


async def test_a_stop_request_after_the_step_is_seen_once(tmp_path: Path) -> None:
    async with own_run(tmp_path) as here:
        assert not here.stop_requested()
        request_stop(tmp_path, StopRequest.STEP)
        assert here.stop_requested()
    assert run_status(tmp_path).status is RunStatus.STOPPED
    async with own_run(tmp_path) as again:
        assert not again.stop_requested()


async def test_a_stop_request_at_once_cancels_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunStoppedError, match="asked to end"):
        async with asyncio.timeout(30), own_run(tmp_path):
            request_stop(tmp_path, StopRequest.NOW)
            await asyncio.Event().wait()
    assert _ended(tmp_path)[0] is Ending.STOPPED


async def test_a_cancelled_run_is_stopped(tmp_path: Path) -> None:
    async def work() -> None:
        async with own_run(tmp_path):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _ended(tmp_path)[0] is Ending.STOPPED


HOLDER = """
import asyncio, sys
from pathlib import Path
from swerl.runs.layout import open_run
from swerl.runs.status import own_run

async def main() -> None:
    async with own_run(Path(sys.argv[1])):
        print("here", flush=True)
        await asyncio.sleep(300)

with open_run(Path(sys.argv[1]), {}):
    asyncio.run(main())
"""


def test_a_killed_process_differs_from_a_running_one(tmp_path: Path) -> None:
    root, copy, moved = tmp_path / "run", tmp_path / "copy", tmp_path / "moved"
    root.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout and holder.stdout.readline() == "here\n"
    seen = run_status(root)
    assert seen.status is RunStatus.RUNNING
    assert seen.process and seen.process.pid == holder.pid
    with pytest.raises(RunError, match="another process"), open_run(root, {}):
        pass
    with pytest.raises(RunError, match=rf"process {holder.pid} on .*, since \d+") as error:
        asyncio.run(require_unused(root, notify=print))
    assert f"swerl train stop {root}" in error.value.hint
    shutil.copytree(root, copy)
    assert run_status(copy).status is RunStatus.LOST
    asyncio.run(require_unused(copy, notify=print))
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert run_status(root).status is RunStatus.LOST
    root.rename(moved)
    assert run_status(moved).status is RunStatus.LOST
    holder.stdout.close()


async def run_elsewhere(root: Path) -> None:
    """Leave a run that a process of another machine owns, whose heartbeat is of this moment."""
    async with own_run(root):
        pass
    path = root / "process.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "host": "elsewhere", "ending": None, "ended": 0}))
    (root / "heartbeat").touch()


async def test_another_machines_process_is_known_by_its_heartbeat(tmp_path: Path) -> None:
    await run_elsewhere(tmp_path)
    assert run_status(tmp_path).status is RunStatus.RUNNING
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.02):
            (tmp_path / "heartbeat").touch()

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(RunError, match="on elsewhere"):
        await require_unused(tmp_path, notify=print)
    over.set()
    beating.join()
    os.utime(tmp_path / "heartbeat", (1, 1))
    notices: list[str] = []
    assert run_status(tmp_path).status is RunStatus.LOST
    await require_unused(tmp_path, notify=notices.append)
    assert not notices


async def test_a_machine_that_failed_a_moment_ago_delays_a_new_run_only_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "SILENT_S", 0.5)
    await run_elsewhere(tmp_path)
    notices: list[str] = []
    await require_unused(tmp_path, notify=notices.append)
    assert notices[0].endswith("0 s old; waiting up to 0 s for the next one")
    assert run_status(tmp_path).status is RunStatus.LOST


def test_a_damaged_process_file_is_one_clear_error(tmp_path: Path) -> None:
    RunFolder(tmp_path)
    (tmp_path / "process.json").write_text('{"pid": 1}')
    with pytest.raises(RunError, match="damaged"):
        run_status(tmp_path)
