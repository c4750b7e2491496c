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
"""Heartbeat age from which a process on another machine counts as lost: clocks differ, and a busy
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
    """By a stop request, Ctrl-C, a termination signal, or a limit of steps."""
    FAILED = "failed"


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
    LOST = "lost"
    """No process is seen and none recorded an ending: it was killed, its machine failed or cannot
    be reached, or the folder is a copy."""
    NEW = "new"
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
    owner = RunOwner(root, RunProcess(pid, host, boot_id(), time.time()))
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
            _end(owner, Ending.STOPPED)
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
        is_finished = RunFolder(root).read_state().finished
        _end(owner, Ending.FINISHED if is_finished else Ending.STOPPED)
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


_FIELDS = ("pid", "host", "boot", "started", "ended", "error", "hint")


def read_process(root: Path) -> RunProcess | None:
    """Return the last owner of a run. Raises RunError on a damaged file."""
    path = root / "process.json"
    if not path.exists():
        return None
    value = read_json(path)
    try:
        parts = tuple(RunPart(**part) for part in value.pop("parts"))
        ending = Ending(value.pop("ending")) if value["ending"] else value.pop("ending")
        fields = {name: value[name] for name in _FIELDS}
        return RunProcess(**fields, parts=parts, ending=ending)
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


def run_status(root: Path) -> StatusReport:
    """Return the status of a run folder, from the folder alone. Raises RunError on damage."""
    process = read_process(root)
    age_s = max(0.0, time.time() - _last_beat(root))
    if process is not None and process.ending is not None:
        status = RunStatus(process.ending)
    elif _is_locked(root):
        status = RunStatus.RUNNING
    elif process is None:
        status = RunStatus.NEW
    else:
        # On this machine the lock is reliable. That of another machine may be invisible here, so
        # the heartbeat decides.
        is_here = process.host == platform.node() and process.boot == boot_id()
        is_lost = is_here or age_s >= SILENT_S
        status = RunStatus.LOST if is_lost else RunStatus.RUNNING
    return StatusReport(status, process, age_s)


async def require_unused(root: Path, *, notify: Notify) -> None:
    """Raise RunError if another process works on the folder.

    Locks of other machines may be invisible. A process whose last heartbeat is recent may be gone,
    because a scheduler restarts a run at once; so this waits up to SILENT_S for its next one.
    """
    report = run_status(root)
    process = report.process
    if report.status is not RunStatus.RUNNING or process is None:
        return
    patience_s = SILENT_S - report.beat_s
    if not _is_locked(root):
        notify(
            f"the last heartbeat of process {process.pid} on {process.host} is "
            f"{report.beat_s:.0f} s old; waiting up to {patience_s:.0f} s for the next one"
        )
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
