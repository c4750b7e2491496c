"""The system call filter of every process in a sandbox.

A deny list: calls that reach outside the namespaces (keys, eBPF, performance counters, modules,
vsock), calls that make namespaces or mounts, calls by which code under test could leave notes for a
later sandbox (which pages of a shared file are in memory, on which node memory lies), and io_uring,
which no filter can inspect. Calls that take descriptors or memory of another process are refused
too, as a second wall behind the supervisor's own; `ptrace` stays, for debuggers and leak checkers.
A denied call fails with EPERM, or with ENOSYS if programs have a fallback for it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct

from swerl.sandboxes import _kernel as kernel

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000
_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000
_NAMESPACES = 0x7E02_0000
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK

# name: (x86_64, aarch64)
_DENIED = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "quotactl": (179, 60),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "syslog": (103, 116), "pidfd_getfd": (438, 438),
    "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "lookup_dcookie": (212, 18),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "quotactl_fd": (443, 443),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "set_mempolicy_home_node": (450, 450),
}  # fmt: skip
_ABSENT = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "clone3": (435, 435), "preadv2": (327, 286), "mincore": (27, 232), "cachestat": (451, 451),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "io_setup": (206, 0),
}  # fmt: skip
_SETNS = (308, 268)
_CLONE = (56, 220)
_SOCKET = (41, 198)
_PRLIMIT = (302, 261)


def install(password: int) -> bool:
    """Install the filter for this process and its children; needs no_new_privs.

    `setns` can still enter a user namespace for a caller that passes the password. Returns False on
    a processor for which the tables have no numbers.
    """
    machine = os.uname().machine
    if machine not in _ARCH:
        return False
    code = _build(machine, password)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, program)
    return True


def _build(machine: str, password: int) -> bytes:
    column = list(_ARCH).index(machine)
    # The architecture first: another one gives the same numbers to other calls.
    code = [_load(4), _jump(0x15, _ARCH[machine], 1, 0), _return(_ERRNO | _ENOSYS), _load(0)]
    # x32 calls have numbers of their own, which the tables lack.
    if machine == "x86_64":
        code += [_jump(0x35, _X32_BIT, 0, 1), _return(_ERRNO | _ENOSYS)]
    code.append(denials(machine))
    code += [
        # setns: refused without the password, in the unused third argument
        _jump(0x15, _SETNS[column], 0, 8),
        *(_load(32), _jump(0x15, password & 0xFFFF_FFFF, 0, 5)),
        *(_load(36), _jump(0x15, password >> 32, 0, 3)),
        *(_load(24), _jump(0x15, kernel.NEWUSER, 0, 1)),
        _return(_ALLOW),
        _return(_ERRNO | _EPERM),
        # prlimit64: refused for the init process, which a limit on its CPU time would end
        _jump(0x15, _PRLIMIT[column], 0, 4),
        _load(16),
        _jump(0x15, 1, 0, 1),
        _return(_ERRNO | _EPERM),
        _return(_ALLOW),
        # clone: refused if it requests a namespace
        _jump(0x15, _CLONE[column], 0, 4),
        _load(16),
        _jump(0x45, _NAMESPACES, 0, 1),
        _return(_ERRNO | _EPERM),
        _return(_ALLOW),
        # socket: only families that end inside the network namespace
        _jump(0x15, _SOCKET[column], 0, 2 + len(_FAMILIES)),
        _load(16),
        *(_jump(0x15, family, len(_FAMILIES) - nth, 0) for nth, family in enumerate(_FAMILIES)),
        _return(_ERRNO | _EPERM),
        _return(_ALLOW),
    ]
    return b"".join(code)


@functools.cache  # the spawner makes it, for all its sandboxes
def denials(machine: str) -> bytes:
    """Return the part of the filter that denies calls by number; empty without a table of them."""
    code = []
    for table, error in ((_DENIED, _EPERM), (_ABSENT, _ENOSYS)):
        for numbers in table.values() if machine in _ARCH else ():
            number = numbers[list(_ARCH).index(machine)]
            code += [_jump(0x15, number, 0, 1), _return(_ERRNO | error)]
    return b"".join(code)


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(operation: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _return(value: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, value)
