"""What a sandbox must not see or use up of the kernel, for which its user is one of the host.

Some files of /proc are readable for root without a capability, and root's number is what a
sandbox has where root runs swerl. Some things the kernel counts by user, whoever is the sandbox:
without a limit of its own one sandbox could take all that the host's user has.
"""

from __future__ import annotations

import os
from contextlib import suppress

from swerl.sandboxes._local import kernel

_HIDDEN = (
    "kcore", "kmsg", "keys", "key-users", "kpagecgroup", "kpagecount", "kpageflags",
    "pagetypeinfo", "sched_debug", "slabinfo", "timer_list", "timer_stats", "vmallocinfo",
    "latency_stats", "allocinfo",
)  # fmt: skip
_COUNTED = {
    "max_inotify_instances": 16, "max_inotify_watches": 16_384,
    "max_fanotify_groups": 16, "max_fanotify_marks": 4_096,
}  # fmt: skip
"""Most of each that one sandbox may have; a host's user has 128 instances and groups."""


def hide(proc: str) -> None:
    """Make the files of this /proc empty that tell of the whole machine. Raises OSError."""
    for name in _HIDDEN:
        with suppress(FileNotFoundError):
            kernel.mount("/dev/null", f"{proc}/{name}", flags=kernel.MS_BIND)


def open_counts() -> int:
    """Return a descriptor of the kernel's limits by user, while they can be written."""
    return os.open("/proc/sys/user", os.O_PATH | os.O_DIRECTORY)


def bound_counts(counts: int) -> None:
    """Bound what this process's user namespace may take of them, and close the descriptor.

    A machine whose settings are read-only keeps its own bounds.
    """
    for name, most in _COUNTED.items():
        with suppress(OSError):
            fd = os.open(name, os.O_WRONLY, dir_fd=counts)
            os.write(fd, str(most).encode())
            os.close(fd)
    os.close(counts)
