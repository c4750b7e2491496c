"""Kernel files that reveal or change state of the whole machine."""

from __future__ import annotations

import os
import stat

from tests.attacks.inside.calls import name_of, try_open

_SETTINGS = (
    "kernel/core_pattern", "kernel/modprobe", "kernel/panic", "kernel/randomize_va_space",
    "kernel/sysrq", "kernel/pid_max", "vm/overcommit_memory", "fs/file-max", "fs/suid_dumpable",
    "fs/binfmt_misc/register",
)  # fmt: skip
_TRIGGERS = ("/proc/sysrq-trigger", "/proc/acpi/wakeup", "/sys/power/state", "/proc/scsi/scsi")
_SECRETS = (
    "/proc/kcore", "/proc/kmsg", "/proc/kpagecount", "/proc/kpageflags", "/proc/timer_list",
    "/proc/sched_debug", "/proc/vmallocinfo", "/proc/slabinfo", "/dev/mem", "/dev/port",
    "/dev/kmsg", "/sys/kernel/debug/sched/debug", "/sys/firmware/dmi/tables/DMI",
)  # fmt: skip
_READ_AWAY = ("/proc/kmsg", "/dev/port", "/dev/mem")
"""Files with side effects when read; they are only opened."""
_LEADING_OUT = {
    "kvm", "mem", "kmem", "port", "kmsg", "fuse", "tun", "loop-control", "vhost-net",
    "vhost-vsock", "vsock", "uinput", "userfaultfd", "snapshot", "cuse", "mapper", "vfio",
}  # fmt: skip
_MOST, _ENOUGH = 20_000, 5


def write_settings() -> dict[str, str]:
    """Write the current values to the kernel's settings, and open files that act on a write."""
    paths = [f"/proc/sys/{name}" for name in _SETTINGS]
    triggers = {path: try_open(path, os.O_WRONLY) for path in _TRIGGERS}
    return {**{path: _write_same(path) for path in paths}, **triggers}


def read_secrets() -> dict[str, str]:
    """Read the kernel's files about its memory and every process."""
    return {name: _read_some(name) for name in _SECRETS if os.path.exists(name)}


def write_sys() -> dict[str, str]:
    """Find writable files in /sys without opening them, because some act at once."""
    outcomes = {}
    num_files = 0
    for folder, _, names in os.walk("/sys"):
        for name in names:
            num_files += 1
            path = os.path.join(folder, name)
            if not os.path.islink(path) and os.access(path, os.W_OK):
                outcomes[path] = "ok"
        if num_files > _MOST or len(outcomes) > _ENOUGH:
            break
    return outcomes


def make_groups() -> dict[str, str]:
    """Create a control group; open the setting for the program run on empty groups."""
    outcomes = {}
    with open("/proc/self/mountinfo") as file:
        lines = [line.split() for line in file]
    points = [words[4] for words in lines if words[words.index("-") + 1][:6] == "cgroup"]
    for point in points:
        path = os.path.join(point, f"swerl-probe-{os.getpid()}")
        try:
            os.mkdir(path)
            os.rmdir(path)
            outcomes[f"a group in {point}"] = "ok"
        except OSError as error:
            outcomes[f"a group in {point}"] = name_of(error)
        agent = os.path.join(point, "release_agent")
        if os.path.exists(agent):
            outcomes[agent] = try_open(agent, os.O_WRONLY)
    return outcomes


def open_devices() -> dict[str, str]:
    """Open disks and devices that lead out, but no others, because some act when opened."""
    outcomes = {}
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(folder, name)
            if name in _LEADING_OUT or _is_disk(path):
                outcomes[path] = try_open(path, os.O_RDONLY)
    return outcomes


def _write_same(path: str) -> str:
    try:
        with open(path) as file:
            value = file.read()
    except OSError:
        value = ""  # some are write-only
    try:
        with open(path, "w") as file:
            if value:
                file.write(value)
    except OSError as error:
        return name_of(error)
    return "ok"


def _read_some(path: str) -> str:
    if os.stat(path).st_rdev == os.stat("/dev/null").st_rdev:
        return "masked"
    if path in _READ_AWAY:
        return try_open(path, os.O_RDONLY)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return name_of(error)
    try:
        return "ok" if os.read(fd, 64) else "empty"
    except OSError as error:
        return name_of(error)
    finally:
        os.close(fd)


def _is_disk(path: str) -> bool:
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False
