"""How many processes the kernel killed for want of memory: a rank that it killed cannot say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return the kernel's count for this process's control group, else for its machine.

    Groups below it, as sandboxes have, are not counted. `root` holds proc and sys.
    """
    for path in _counts(root):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _counts(root: Path) -> Iterator[Path]:
    """Yield files that may have the count, the narrowest first."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            # In a container the mounted folder may be the group itself.
            for place in (path.lstrip("/"), ""):
                if number == "0":
                    yield root / "sys/fs/cgroup" / place / "memory.events.local"
                elif "memory" in controllers.split(","):
                    yield root / "sys/fs/cgroup/memory" / place / "memory.oom_control"
    yield root / "proc/vmstat"
