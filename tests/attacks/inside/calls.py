"""System calls by name, which return `ok` or the name of the error."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

# name: (x86_64, aarch64)
_NUMBERS = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280),
    "chroot": (161, 51), "clock_settime": (227, 112), "delete_module": (176, 106),
    "finit_module": (313, 273), "fsopen": (430, 430), "init_module": (175, 105),
    "inotify_init1": (294, 26), "io_uring_setup": (425, 425), "kexec_load": (246, 104),
    "keyctl": (250, 219), "mount": (165, 40), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241),
    "pivot_root": (155, 41), "process_vm_readv": (310, 270), "ptrace": (101, 117),
    "reboot": (169, 142), "sethostname": (170, 161), "setns": (308, 268),
    "settimeofday": (164, 170), "shmat": (30, 196), "shmget": (29, 194), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def number_of(name: str) -> int:
    """Return the number of a system call on this processor."""
    return _NUMBERS[name][0 if platform.machine() == "x86_64" else 1]


def raw(name: str, *arguments: int | bytes | None) -> int:
    """Make a system call and return its result. Raises OSError."""
    wide = [ctypes.c_long(part) if isinstance(part, int) else part for part in arguments]
    result = int(_libc.syscall(ctypes.c_long(number_of(name)), *wide))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def attempt(name: str, *arguments: int | bytes | None) -> str:
    """Make a system call; return `ok`, or the name of its error."""
    try:
        raw(name, *arguments)
    except OSError as error:
        return name_of(error)
    return "ok"


def name_of(error: OSError) -> str:
    """Return the name of an error, such as EPERM."""
    return errno.errorcode.get(error.errno or 0, str(error))


def try_open(path: str, flags: int) -> str:
    """Open a file and close it again; return `ok`, or the name of the error."""
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))
    except OSError as error:
        return name_of(error)
    return "ok"
