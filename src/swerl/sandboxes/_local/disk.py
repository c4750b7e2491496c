"""Bounds what a sandbox writes where that lies on disk and not in memory.

Root gives the sandbox a file system of its own in a sparse file, which is full at its size, and
whose loop device goes with its last mount. Others cannot mount one: there a process beside the
warden adds up what lies in the sandbox's folder, and the sandbox ends when that is over its limit.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from swerl.sandboxes._local import kernel, title
from swerl.sandboxes._local.wire import Plan

_SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_FORMAT = ("-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard")
"""An empty file system in 10 ms; it needs no journal, for nobody mounts it again."""
_LEAST_MIB = 4
_LOOP_GET_FREE, _LOOP_CONFIGURE, _AUTOCLEAR = 0x4C82, 0x4C0A, 4
_LOOP_CONFIG_BYTES, _FLAGS_AT = 304, 60
_TRIES = 50
_PAUSE_S, _PAUSE_RATIO = 0.2, 10.0
"""Pause between two looks at a folder, and at least how many times the look's own time."""
_BLOCK_BYTES = 512


def make_device(plan: Plan) -> int:
    """Return a descriptor of a loop device that holds an empty file system, or -1."""
    program = shutil.which("mkfs.ext4", path=_SYSTEM_PATH)
    if not plan.scratch or os.geteuid() != 0 or not program:
        return -1
    image = Path(plan.scratch, "disk")
    with image.open("wb") as file:
        file.truncate(max(plan.disk_mib, _LEAST_MIB) << 20)
    done = subprocess.run([program, *_FORMAT, str(image)], capture_output=True, check=False)
    try:
        if done.returncode == 0:
            return _attach(image)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
    image.unlink()
    return -1


@dataclass(frozen=True, slots=True)
class Watcher:
    """A process that watches a folder."""

    pid: int
    said: int
    """Descriptor that can be read once the folder holds more than it may."""


def watch(plan: Plan) -> Watcher:
    """Start to watch the sandbox's folder."""
    said, say = os.pipe()
    warden = os.getpid()
    pid = kernel.patiently(os.fork)
    if pid == 0:
        os.close(said)
        _watch(plan, warden, say)
    os.close(say)
    return Watcher(pid, said)


def _attach(image: Path) -> int:
    """Return a loop device of a file; it is given back when nothing uses it any more."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _LOOP_GET_FREE)
            device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
            config = bytearray(_LOOP_CONFIG_BYTES)
            struct.pack_into("I", config, 0, backing)
            struct.pack_into("I", config, _FLAGS_AT, _AUTOCLEAR)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, bytes(config))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # else another one took this number
                    raise
            else:
                return device
    finally:
        os.close(control)
        os.close(backing)
    raise OSError(errno.EBUSY, "no loop device is free")


def _watch(plan: Plan, warden: int, say: int) -> NoReturn:
    with suppress(OSError):
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        title.write("swerl-disk", plan.id)
        while os.getppid() == warden:
            started = time.monotonic()
            if _size_of(plan.scratch) > plan.disk_mib << 20:
                os.write(say, b"!")
                break
            time.sleep(max(_PAUSE_S, _PAUSE_RATIO * (time.monotonic() - started)))
    os._exit(0)


def _size_of(folder: str) -> int:
    """Return the bytes that a folder takes on its disk; what vanishes meanwhile counts nothing."""
    sizes: dict[int, int] = {}
    for _, _, names, fd in os.fwalk(folder):
        for name in names:
            with suppress(OSError):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                sizes[status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return sum(sizes.values())
