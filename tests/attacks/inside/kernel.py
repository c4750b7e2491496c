"""Kernel files that reveal or change state of the whole machine."""

from __future__ import annotations

import os
import stat

from tests.attacks.inside.calls import name_of, try_open

_SETTINGS = (
    "kernel/core_pattern", "kernel/modprobe", "kernel/hotplug", "kernel/panic", "kernel/printk",
    "kernel/randomize_va_space", "kernel/sysrq", "kernel/pid_max", "kernel/dmesg_restrict",
    "vm/overcommit_memory", "vm/swappiness", "fs/file-max", "fs/suid_dumpable",
    "fs/binfmt_misc/register", "fs/binfmt_misc/status",
)  # fmt: skip
_SECRETS = (
    "/proc/kcore", "/proc/kmsg", "/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup",
    "/proc/timer_list", "/proc/sched_debug", "/proc/vmallocinfo", "/proc/pagetypeinfo",
    "/proc/slabinfo", "/proc/latency_stats", "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg",
    "/sys/kernel/debug/sched/debug", "/sys/firmware/dmi/tables/DMI",
)  # fmt: skip
_READ_AWAY = ("/proc/kmsg", "/dev/port", "/dev/mem", "/dev/kmem")
"""Files with side effects when read; they are only opened."""
_LEADING_OUT = {
    "kvm", "mem", "kmem", "port", "kmsg", "fuse", "tun", "loop-control", "vhost-net",
    "vhost-vsock", "vsock", "uinput", "userfaultfd", "snapshot", "cuse", "mapper", "vfio",
}  # fmt: skip
_MOST, _ENOUGH = 20_000, 5


def write_settings() -> dict[str, str]:
    """Write the current values to the kernel's settings."""
    return {f"/proc/sys/{name}": _write_same(f"/proc/sys/{name}") for name in _SETTINGS}


def open_triggers() -> dict[str, str]:
    """Open files for writing in which a write acts on the machine at once."""
    names = ("/proc/sysrq-trigger", "/proc/acpi/wakeup", "/sys/power/state", "/proc/scsi/scsi")
    return {name: try_open(name, os.O_WRONLY) for name in names}


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
    outcomes[f"{num_files} files"] = "read-only" if num_files else "nothing in /sys"
    return outcomes


def make_groups(name: str) -> dict[str, str]:
    """Create a control group; open the setting for the program run on empty groups."""
    outcomes = {}
    for point in _mounts(("cgroup", "cgroup2")):
        path = os.path.join(point, name)
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


def _mounts(kinds: tuple[str, ...]) -> list[str]:
    with open("/proc/self/mountinfo") as file:
        lines = [line.split() for line in file]
    return [words[4] for words in lines if words[words.index("-") + 1] in kinds]


def _is_disk(path: str) -> bool:
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False
