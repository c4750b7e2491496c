"""Whether a run is at work, and if not, how it ended: from its folder alone, on any machine."""

from __future__ import annotations

import asyncio
import fcntl
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from swerl.core.errors import RunError
from swerl.core.liveness import boot_id
from swerl.runs.presence import BEAT_S, SILENT_S, Ending, Process, last_beat, read_process


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
