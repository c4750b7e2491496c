"""Run status: the process that owns a run folder, its heartbeat, its end, and stop requests.

`process.json` names the owner and how it ended, the owner touches `heartbeat` while it lives, and
`stop.json` holds a stop request. All are plain files, so every machine that shares the folder can
read and write them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import platform
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from swerl.core.errors import RunError, RunStoppedError, SwerlError
from swerl.core.files import disk_errors, read_json, write_json
from swerl.core.liveness import boot_id
from swerl.core.secrets import without_logins
from swerl.runs.layout import RunFolder

BEAT_S = 5.0
"""Seconds between two touches of the heartbeat, and between two checks for a stop request."""
SILENT_S = 60.0
"""Heartbeat age from which a process on another machine counts as gone: clocks differ, and a busy
file server is late."""
BLOCK_BYTES = 4096
"""Size of the smallest file on most disks."""
RESUME_HINT = "`swerl train resume` continues from the last committed step"

Notify = Callable[[str], None]


class Ending(StrEnum):
    """The end of a process that owned a run."""

    FINISHED = "finished"
    """The run is done."""
    STOPPED = "stopped"
    """By a stop request, or because the command was limited to fewer steps."""
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """By Ctrl-C or a termination signal."""


class StopRequest(StrEnum):
    """The time at which a run is asked to end."""

    STEP = "step"
    """When the running step is committed."""
    NOW = "now"
    """At once; finished Episodes are kept."""


class RunStatus(StrEnum):
    """The state of a run folder."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    """Its process is gone without an ending: it was killed, or its machine failed."""
    COPIED = "copied"
    """The folder is a copy; only the original shows the state of the process."""
    SILENT = "silent"
    """A process on another machine gives no heartbeat; its state is unknown here."""
    UNTOUCHED = "untouched"
    """No process has worked here."""


@dataclass(frozen=True, slots=True)
class RunPart:
    """Another process that belongs to a run."""

    name: str
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class RunProcess:
    """The last owner of a run, as it recorded itself in `process.json`."""

    pid: int
    host: str
    boot: str
    """Boot id: process ids of two boots are unrelated."""
    started: float
    """Seconds since 1970."""
    folder: str = ""
    """Path of the run folder; a copy of the folder has another path."""
    inode: int = 0
    """Inode of that folder; a moved folder keeps it."""
    parts: tuple[RunPart, ...] = ()
    ended: float = 0.0
    """Seconds since 1970; 0 while it runs, and forever if it was killed."""
    ending: Ending | None = None
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The status of a run folder at one moment."""

    status: RunStatus
    process: RunProcess | None
    beat_s: float
    """Seconds since the last heartbeat."""


@dataclass(slots=True)
class RunOwner:
    """This process as the owner of a run."""

    root: Path
    process: RunProcess
    stop: StopRequest | None = None

    def record_parts(self, parts: tuple[RunPart, ...]) -> None:
        """Record the other processes of the run."""
        self.process = replace(self.process, parts=parts)
        _write(self.root, self.process)

    def stop_requested(self) -> bool:
        self.stop = requested_stop(self.root)
        return self.stop is not None


@asynccontextmanager
async def own_run(root: Path) -> AsyncIterator[RunOwner]:
    """Record this process as the owner of a run folder, which it holds locked, during the block.

    Raises RunStoppedError if a stop request ended the block at once.
    """
    pid, host = os.getpid(), platform.node()
    folder, inode = str(root.resolve()), root.stat().st_ino
    process = RunProcess(pid, host, boot_id(), time.time(), folder=folder, inode=inode)
    owner = RunOwner(root, process)
    # A request to an earlier process must not stop this one.
    (root / "stop.json").unlink(missing_ok=True)
    _write(root, owner.process)
    task = asyncio.current_task()
    assert task is not None
    beat = asyncio.create_task(_beat(owner, task))
    try:
        yield owner
    except asyncio.CancelledError:
        if owner.stop is not StopRequest.NOW:
            _end(owner, Ending.INTERRUPTED)
            raise
        # The heartbeat task cancelled this one, and the cancellation is handled here.
        task.uncancel()
        _end(owner, Ending.STOPPED)
        raise RunStoppedError("the run was asked to end at once", hint=RESUME_HINT) from None
    except BaseException as error:
        # The first error of a group is its cause.
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        prefix = "" if isinstance(cause, SwerlError) else f"{type(cause).__name__}: "
        _end(owner, Ending.FAILED, f"{prefix}{cause}", getattr(cause, "hint", ""))
        raise
    else:
        done = RunFolder(root).read_state().finished
        _end(owner, Ending.FINISHED if done else Ending.STOPPED)
    finally:
        beat.cancel()
        with suppress(asyncio.CancelledError):
            await beat
        (root / "stop.json").unlink(missing_ok=True)


async def _beat(owner: RunOwner, task: asyncio.Task[Any]) -> None:
    while True:
        with suppress(OSError):
            (owner.root / "heartbeat").touch()
        if owner.stop_requested() and owner.stop is StopRequest.NOW:
            task.cancel()
            return
        await asyncio.sleep(BEAT_S)


def _end(owner: RunOwner, ending: Ending, error: str = "", hint: str = "") -> None:
    ended = replace(
        owner.process,
        ended=time.time(),
        ending=ending,
        error=without_logins(error),
        hint=hint,
        parts=(),
    )
    try:
        _write(owner.root, ended)
    except RunError:
        # A full disk must not hide the error. Overwriting the file in place needs no new block.
        short = replace(ended, error=error[: BLOCK_BYTES // 4], hint=hint[:200])
        with suppress(OSError), (owner.root / "process.json").open("r+b") as file:
            file.write(json.dumps(asdict(short)).encode()[:BLOCK_BYTES])
            file.truncate()


def _write(root: Path, process: RunProcess) -> None:
    with disk_errors(root):
        write_json(root / "process.json", asdict(process))


def read_process(root: Path) -> RunProcess | None:
    """Return the last owner of a run. Raises RunError on a damaged file."""
    path = root / "process.json"
    if not path.exists():
        return None
    value = read_json(path)
    try:
        parts = tuple(RunPart(**each) for each in value.pop("parts"))
        ending = Ending(value.pop("ending")) if value["ending"] else value.pop("ending")
        return RunProcess(**value, parts=parts, ending=ending)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged: {error!r}", hint="delete that file; it only names the run's owner"
        ) from error


def request_stop(root: Path, when: StopRequest) -> None:
    """Ask the owner of a run to end it."""
    write_json(root / "stop.json", {"when": when, "asked": time.time(), "by": platform.node()})


def requested_stop(root: Path) -> StopRequest | None:
    path = root / "stop.json"
    if not path.exists():
        return None
    with suppress(RunError, KeyError, TypeError, ValueError):
        return StopRequest(read_json(path)["when"])
    return None


def run_status(
    root: Path, *, patience_s: float = 3 * BEAT_S, notify: Notify = lambda text: None
) -> StatusReport:
    """Return the status of a run folder, from the folder alone.

    If another machine's heartbeat is old, waits up to `patience_s` for the next one.
    """
    process = read_process(root)
    age_s = max(0.0, time.time() - _last_beat(root))
    if process is None:
        held = _is_locked(root)
        return StatusReport(RunStatus.RUNNING if held else RunStatus.UNTOUCHED, None, age_s)
    # An ending was recorded, so no process needs to be looked for.
    if process.ending is not None:
        return StatusReport(RunStatus(process.ending), process, age_s)
    if _is_locked(root):
        return StatusReport(RunStatus.RUNNING, process, age_s)
    if process.host == platform.node() and process.boot == boot_id():
        # On this machine the lock is reliable: without it the process is gone.
        elsewhere = bool(process.folder) and process.folder != str(root.resolve())
        copied = elsewhere and process.inode != root.stat().st_ino
        return StatusReport(RunStatus.COPIED if copied else RunStatus.KILLED, process, age_s)
    # A lock of another machine may be invisible here, so the heartbeat decides.
    if age_s < SILENT_S:
        return StatusReport(RunStatus.RUNNING, process, age_s)
    if patience_s:
        notify(_waiting(process, age_s, patience_s))
    # Clocks differ between machines, but a changed time proves that the process lives.
    before, until = _last_beat(root), time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(min(BEAT_S / 2, patience_s))
        if _last_beat(root) != before:
            return StatusReport(RunStatus.RUNNING, process, age_s)
    return StatusReport(RunStatus.SILENT, process, age_s)


async def require_unused(root: Path, *, notify: Notify) -> None:
    """Raise RunError if another process works on the folder.

    Locks of other machines may be invisible. A process whose last heartbeat is recent may be gone,
    because a scheduler restarts a run at once; so this waits up to SILENT_S for its next one.
    """
    seen = run_status(root, patience_s=0.0)
    process = seen.process
    if seen.status is not RunStatus.RUNNING or process is None:
        return
    patience_s = SILENT_S - seen.beat_s
    if not _is_locked(root):
        notify(_waiting(process, seen.beat_s, patience_s))
        before, until = _last_beat(root), time.monotonic() + patience_s
        while _last_beat(root) == before:
            if time.monotonic() >= until:
                return
            await asyncio.sleep(min(BEAT_S / 2, patience_s))
    began = datetime.fromtimestamp(process.started).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    message = f"{root} is in use: process {process.pid} on {process.host}, since {began}"
    hint = (
        f"`swerl train status {root}` shows its progress and `swerl train stop {root}` ends it; "
        "--set name=… names another run"
    )
    raise RunError(message, hint=hint)


def _waiting(process: RunProcess, age_s: float, patience_s: float) -> str:
    return (
        f"the last heartbeat of process {process.pid} on {process.host} is {age_s:.0f} s old; "
        f"waiting up to {patience_s:.0f} s for the next one"
    )


def _last_beat(root: Path) -> float:
    """Return the time of the last heartbeat in seconds since 1970; 0 for never."""
    with suppress(FileNotFoundError):
        return (root / "heartbeat").stat().st_mtime
    return 0.0


def _is_locked(root: Path) -> bool:
    """Return whether a process holds the folder's lock, as far as this machine can see."""
    path = root / "lock"
    if not path.exists():
        return False
    with path.open("r") as lock:
        try:
            # A shared lock fails only if another process holds the exclusive one.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
