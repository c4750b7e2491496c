"""What `ps` and /proc show of a sandbox's own processes, in place of the spawner's command line."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

WARDEN = "swerl-warden"
FIRST = "sandbox"

_ARG_START, _ARG_END = 48, 49
_STAT_FROM = 3
"""Number of the first field of /proc/self/stat after the program's name."""


def write(*words: str) -> None:
    """Show these words as this process's command line, as far as they fit in its place."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[number - _STAT_FROM]) for number in (_ARG_START, _ARG_END))
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def read(pid: int) -> list[str]:
    """Return a process's command line, empty where it is gone or a kernel thread."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(text.rstrip(b"\0")).split("\0")
