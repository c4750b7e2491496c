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

_SHARED_PART = 16
_PAGE_BYTES = 4096
_OUTLIVING = {"shm_rmid_forced": "1", "msgmni": "64", "sem": "250 3200 100 128"}
"""System V memory, queues and semaphores outlive who made them: without bounds a sandbox could
leave its memory full of them, so that no command could start in it any more."""


def hide(proc: str) -> None:
    """Make the files of this /proc empty that tell of the whole machine. Raises OSError."""
    for name in _HIDDEN:
        with suppress(FileNotFoundError):
            kernel.mount("/dev/null", f"{proc}/{name}", flags=kernel.MS_BIND)


def open_settings() -> int:
    """Return a descriptor of the kernel's settings, while they can be written."""
    return os.open("/proc/sys", os.O_PATH | os.O_DIRECTORY)


def bound(settings: int, memory_mib: int) -> None:
    """Bound what this process's namespaces may take of the kernel, and close the descriptor.

    A machine whose settings are read-only, or a kernel that lets only the host's root write them,
    keeps its own bounds.
    """
    shared = {"shmall": f"{(memory_mib << 20) // _SHARED_PART // _PAGE_BYTES}", **_OUTLIVING}
    wanted = {f"user/{name}": str(most) for name, most in _COUNTED.items()}
    wanted |= {f"kernel/{name}": value for name, value in shared.items()}
    for path, value in wanted.items():
        with suppress(OSError):
            fd = os.open(path, os.O_WRONLY, dir_fd=settings)
            try:
                os.write(fd, value.encode())
            finally:
                os.close(fd)
    os.close(settings)
