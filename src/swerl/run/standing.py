"""Whether a run is at work, and if not, how it ended: from its folder alone, on any machine."""

from __future__ import annotations

import fcntl
import platform
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from swerl.errors import RunError
from swerl.run.presence import (
    BEAT_S,
    SILENT_S,
    Ending,
    Process,
    boot_id,
    last_beat,
    read_process,
)


class Standing(StrEnum):
    """What goes on in a run folder."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    """Its process is gone and did not say why: killed, or its machine went."""
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


def look(root: Path, *, patience_s: float = 3 * BEAT_S) -> Look:
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
        return Look(Standing.KILLED, process, age_s)  # the lock of a process here is sure
    if age_s < SILENT_S or _beats(root, patience_s):
        return Look(Standing.RUNNING, process, age_s)
    return Look(Standing.SILENT, process, age_s)


def require_alone(root: Path) -> None:
    """Raise RunError where another machine works on the folder, which a lock need not show.

    A machine that gave its last sign a moment ago may be gone: a scheduler starts a run again at
    once. So its next sign is waited for, up to SILENT_S.
    """
    seen = look(root, patience_s=0.0)
    process = seen.process
    if seen.standing is not Standing.RUNNING or process is None:
        return
    is_elsewhere = (process.host, process.boot) != (platform.node(), boot_id())
    if is_elsewhere and (_is_held(root) or _beats(root, SILENT_S - seen.beat_s)):
        message = f"{root} is in use: process {process.pid} on {process.host}"
        hint = f"`swerl train stop {root}` ends it, from any machine that shares the folder"
        raise RunError(message, hint=hint)


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
