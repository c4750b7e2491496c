"""Who works on a run folder, since when, and how it ended; and the wish that it may stop.

`process.json` says who began and how it ended, `heartbeat` is touched while it lives, `stop.json`
holds a wish. All three are plain files, so another machine that shares the folder can read and
write them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import platform
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from swerl.core.errors import RunError, RunStoppedError, SwerlError
from swerl.core.files import disk_errors, read_json, write_json
from swerl.core.liveness import boot_id
from swerl.runs.layout import RunFolder

BEAT_S = 5.0
"""Seconds between two touches of the heartbeat, and between two looks for a wish to stop."""
SILENT_S = 60.0
"""Age of a heartbeat from which its process counts as gone where nothing surer is known: machines'
clocks differ, and a busy file server is late."""
BLOCK_BYTES = 4096
"""What the smallest file takes on most disks."""


class Ending(StrEnum):
    """How a process that worked on a run came to its end."""

    FINISHED = "finished"
    """The run is done."""
    STOPPED = "stopped"
    """Somebody asked for it, or the command was told to do less than the recipe."""
    FAILED = "failed"
    """An error ended it."""
    INTERRUPTED = "interrupted"
    """Ctrl-C, or a signal that asks to end."""


class Stop(StrEnum):
    """When a run is asked to end."""

    STEP = "step"
    """After the step under way is committed."""
    NOW = "now"
    """At once; finished Episodes are kept."""


@dataclass(frozen=True, slots=True)
class Part:
    """A process that belongs to a run."""

    name: str
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class Process:
    """The last process that worked on a run, by its own account."""

    pid: int
    host: str
    boot: str
    """Tells one start of the machine, and so of its process ids, from another."""
    started: float
    """Seconds since 1970."""
    folder: str = ""
    """Where it saw the run folder; a copy of the folder lies elsewhere."""
    inode: int = 0
    """What the file system calls that folder; a folder that is moved keeps it."""
    parts: tuple[Part, ...] = ()
    ended: float = 0.0
    """Seconds since 1970; 0 while it runs, and for ever where it was killed."""
    ending: Ending | None = None
    error: str = ""
    hint: str = ""


@dataclass(slots=True)
class Presence:
    """What the process at work says of itself, and what it is asked."""

    root: Path
    process: Process
    stop: Stop | None = field(default=None)

    def has(self, parts: tuple[Part, ...]) -> None:
        """Write down which processes belong to the run."""
        self.process = replace(self.process, parts=parts)
        _write(self.root, self.process)

    def stopping(self) -> bool:
        """Return whether somebody asked the run to end."""
        self.stop = asked_to_stop(self.root)
        return self.stop is not None


@asynccontextmanager
async def present(root: Path) -> AsyncIterator[Presence]:
    """Say that this process works on a run folder, which it holds locked, until the block ends.

    Raises RunStoppedError where somebody asked it to end at once.
    """
    process = Process(
        os.getpid(),
        platform.node(),
        boot_id(),
        time.time(),
        folder=str(root.resolve()),
        inode=root.stat().st_ino,
    )
    presence = Presence(root, process)
    (root / "stop.json").unlink(missing_ok=True)
    _write(root, presence.process)
    task = asyncio.current_task()
    assert task is not None
    beat = asyncio.create_task(_beat(presence, task))
    try:
        yield presence
    except asyncio.CancelledError:
        if presence.stop is not Stop.NOW:
            _end(presence, Ending.INTERRUPTED)
            raise
        task.uncancel()
        _end(presence, Ending.STOPPED)
        raise RunStoppedError("the run was asked to end at once", hint=GO_ON) from None
    except BaseException as error:
        cause = _first(error)
        is_told = isinstance(cause, SwerlError)
        text = str(cause) if is_told else f"{type(cause).__name__}: {cause}"
        _end(presence, Ending.FAILED, text, getattr(cause, "hint", ""))
        raise
    else:
        done = RunFolder(root).read_state().finished
        _end(presence, Ending.FINISHED if done else Ending.STOPPED)
    finally:
        beat.cancel()
        with suppress(asyncio.CancelledError):
            await beat
        (root / "stop.json").unlink(missing_ok=True)


GO_ON = "`swerl train resume` goes on where it stands"


def read_process(root: Path) -> Process | None:
    """Return who worked on a run last. Raises RunError on a damaged file."""
    path = root / "process.json"
    if not path.exists():
        return None
    value = read_json(path)
    try:
        parts = tuple(Part(**each) for each in value.pop("parts"))
        ending = Ending(value.pop("ending")) if value["ending"] else value.pop("ending")
        return Process(**value, parts=parts, ending=ending)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged: {error!r}", hint="delete that file; it only says who worked here"
        ) from error


def ask_to_stop(root: Path, when: Stop) -> None:
    """Leave the wish that the run ends."""
    write_json(root / "stop.json", {"when": when, "asked": time.time(), "by": platform.node()})


def asked_to_stop(root: Path) -> Stop | None:
    """Return when the run is asked to end, if at all."""
    path = root / "stop.json"
    if not path.exists():
        return None
    with suppress(RunError, KeyError, TypeError, ValueError):
        return Stop(read_json(path)["when"])
    return None


def last_beat(root: Path) -> float:
    """Return when the heartbeat was last touched, in seconds since 1970; 0 for never."""
    with suppress(FileNotFoundError):
        return (root / "heartbeat").stat().st_mtime
    return 0.0


async def _beat(presence: Presence, task: asyncio.Task[Any]) -> None:
    while True:
        with suppress(OSError):
            (presence.root / "heartbeat").touch()
        if presence.stopping() and presence.stop is Stop.NOW:
            task.cancel()
            return
        await asyncio.sleep(BEAT_S)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _end(presence: Presence, ending: Ending, error: str = "", hint: str = "") -> None:
    ended = replace(
        presence.process, ended=time.time(), ending=ending, error=error, hint=hint, parts=()
    )
    try:
        _write(presence.root, ended)
    except RunError:  # a full disk must not hide what ended the run
        _write_in_place(presence.root, ended)


def _write_in_place(root: Path, process: Process) -> None:
    """Write over the file that is there, which needs no new block of a full disk."""
    short = replace(process, error=process.error[: BLOCK_BYTES // 4], hint=process.hint[:200])
    with suppress(OSError), (root / "process.json").open("r+b") as file:
        file.write(json.dumps(asdict(short)).encode()[:BLOCK_BYTES])
        file.truncate()


def _write(root: Path, process: Process) -> None:
    with disk_errors(root):
        fields: Mapping[str, Any] = asdict(process)
        write_json(root / "process.json", fields)


class Standing(StrEnum):
    """What goes on in a run folder."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    """Its process is gone and did not say why: killed, or its machine went."""
    COPIED = "copied"
    """The folder is a copy; whether the process lives, the folder that it works in says."""
    SILENT = "silent"
    """Another machine's process gives no sign; whether it lives cannot be told from here."""
    UNTOUCHED = "untouched"
    """Nothing has worked here."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen."""

    standing: Standing
    process: Process | None
    beat_s: float
    """Seconds since the process last gave a sign."""


Tell = Callable[[str], None]


def look(root: Path, *, patience_s: float = 3 * BEAT_S, tell: Tell = lambda text: None) -> Look:
    """Look at a run folder. A sign of another machine that is old is waited for `patience_s`."""
    process = read_process(root)
    age_s = max(0.0, time.time() - last_beat(root))
    if process is None:
        return Look(Standing.RUNNING if _is_held(root) else Standing.UNTOUCHED, None, age_s)
    if process.ending is not None:
        return Look(_ENDED[process.ending], process, age_s)
    if _is_held(root):
        return Look(Standing.RUNNING, process, age_s)
    if process.host == platform.node() and process.boot == boot_id():
        # The lock of a process here is sure.
        is_copy = _is_copy(root, process)
        return Look(Standing.COPIED if is_copy else Standing.KILLED, process, age_s)
    if age_s < SILENT_S:
        return Look(Standing.RUNNING, process, age_s)
    if patience_s:
        tell(_waiting(process, age_s, patience_s))
    beats = _beats(root, patience_s)
    return Look(Standing.RUNNING if beats else Standing.SILENT, process, age_s)


async def require_alone(root: Path, *, tell: Tell) -> None:
    """Raise RunError where another process works on the folder.

    A lock need not show that of another machine. One that gave its last sign a moment ago may be
    gone: a scheduler starts a run again at once. So its next sign is waited for, up to SILENT_S.
    """
    seen = look(root, patience_s=0.0)
    process = seen.process
    if seen.standing is not Standing.RUNNING or process is None:
        return
    patience_s = SILENT_S - seen.beat_s
    if not _is_held(root):
        tell(_waiting(process, seen.beat_s, patience_s))
        before, until = last_beat(root), time.monotonic() + patience_s
        while last_beat(root) == before:
            if time.monotonic() >= until:
                return
            await asyncio.sleep(min(BEAT_S / 2, patience_s))
    began = datetime.fromtimestamp(process.started).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    message = f"{root} is in use: process {process.pid} on {process.host}, since {began}"
    hint = (
        f"`swerl train status {root}` says what it does and `swerl train stop {root}` ends it; "
        "--set name=… names another run"
    )
    raise RunError(message, hint=hint)


def _waiting(process: Process, age_s: float, patience_s: float) -> str:
    return (
        f"process {process.pid} on {process.host} gave its last sign {age_s:.0f} s ago; "
        f"waiting up to {patience_s:.0f} s for another one"
    )


def _is_copy(root: Path, process: Process) -> bool:
    """Return whether a folder of this machine is not the one that its process worked in."""
    elsewhere = bool(process.folder) and process.folder != str(root.resolve())
    return elsewhere and process.inode != root.stat().st_ino


_ENDED = {
    Ending.FINISHED: Standing.FINISHED,
    Ending.STOPPED: Standing.STOPPED,
    Ending.FAILED: Standing.FAILED,
    Ending.INTERRUPTED: Standing.INTERRUPTED,
}


def _is_held(root: Path) -> bool:
    """Return whether a process holds the folder's lock, as far as this machine can see."""
    path = root / "lock"
    if not path.exists():
        return False
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _beats(root: Path, patience_s: float) -> bool:
    before = last_beat(root)
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        time.sleep(min(BEAT_S / 2, patience_s))
        if last_beat(root) != before:
            return True
    return False
