"""A system call filter for daemons whose own lets sockets out to the host's hypervisor (vsock).

Docker's built-in filter refuses them from version 23 on; older ones call it `default`. The filter
here also refuses what theirs does, and io_uring, which no filter can look into. A filter that the
daemon's owner chose is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from swerl.core.chat import Json

_ENOSYS = 38
_REFUSED = (
    "acct", "add_key", "adjtimex", "bpf", "chroot", "clock_adjtime", "clock_settime",
    "create_module", "delete_module", "fanotify_init", "finit_module", "fsconfig", "fsmount",
    "fsopen", "fspick", "get_kernel_syms", "get_mempolicy", "init_module", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mbind", "mount",
    "mount_setattr", "move_mount", "move_pages", "name_to_handle_at", "nfsservctl",
    "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "query_module", "quotactl",
    "quotactl_fd", "reboot", "request_key", "set_mempolicy", "setdomainname", "sethostname",
    "setns", "settimeofday", "swapoff", "swapon", "sysfs", "syslog", "umount2", "unshare",
    "uselib", "userfaultfd", "ustat", "vhangup",
)  # fmt: skip
_ABSENT = ("clone3", "io_uring_enter", "io_uring_register", "io_uring_setup")
"""Programs fall back on others where these seem not to exist."""
_NAMESPACES = tuple(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
_LAST_FAMILY = 16
_FAMILIES = (1, 2, 10, _LAST_FAMILY)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK


def options(daemon_options: Sequence[str]) -> list[str]:
    """Return the security option to add, by what the daemon says of its own."""
    if "name=seccomp,profile=default" not in daemon_options:
        return []
    return [f"seccomp={json.dumps(profile())}"]


def profile() -> dict[str, Json]:
    """Build the filter: all but what is listed is allowed, in the machine's native mode only."""
    return {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": list(_rules())}


def _rules() -> Iterator[dict[str, Json]]:
    yield _refuse(_REFUSED)
    yield {**_refuse(_ABSENT), "errnoRet": _ENOSYS}
    for flag in _NAMESPACES:
        yield _refuse(("clone",), _compare("MASKED_EQ", flag, flag))
    for family in range(_LAST_FAMILY):
        if family not in _FAMILIES:
            yield _refuse(("socket",), _compare("EQ", family))
    yield _refuse(("socket",), _compare("GT", _LAST_FAMILY))


def _refuse(names: Sequence[str], *arguments: Json) -> dict[str, Json]:
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "args": list(arguments)}


def _compare(how: str, value: int, second: int = 0) -> Json:
    return {"index": 0, "op": f"SCMP_CMP_{how}", "value": value, "valueTwo": second}
