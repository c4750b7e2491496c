"""`/proc` of a `local` sandbox shows its processes, and of the machine only fixed texts."""

from __future__ import annotations

import shutil

import pytest

from swerl.core.sandbox import Limits
from swerl.sandboxes import local

LIMITS = Limits(memory_mib=512, num_processes=128, disk_mib=256, lifetime_s=120)
FILES = r"""
import hashlib, os
for folder, folders, names in os.walk("/proc"):
    if folder == "/proc":
        folders[:] = [name for name in folders if not name.isdigit() and name != "sysvipc"]
    folders[:] = [name for name in folders if f"{folder}/{name}" != "/proc/sys/net"]
    for name in names:
        path = f"{folder}/{name}"
        if os.path.islink(path):
            continue  # to the files of a process
        try:
            text = open(path, "rb").read()
        except OSError as error:
            text = str(error.errno).encode()
        if path not in ("/proc/uptime", "/proc/sys/kernel/random/uuid"):
            print(path, os.stat(path).st_size, hashlib.sha256(text).hexdigest())
"""
NOTE = r"""
import ctypes, mmap, os, pty
libc = ctypes.CDLL(None, use_errno=True)
held = [pty.openpty() for _ in range(8)] + [os.open("/dev/null", 0) for _ in range(500)]
held += [libc.inotify_init() for _ in range(8)]
policy = {"x86_64": 238, "aarch64": 237}[os.uname().machine]
mask = ctypes.c_ulong(1)
libc.syscall(policy, 3, ctypes.byref(mask), 64)  # MPOL_INTERLEAVE
pages = mmap.mmap(-1, 64 << 20)
for start in range(0, len(pages), 4096):
    pages[start] = 1
for number in range(300):
    open(f"note.{number}", "w").close()
for _ in range(100):
    if not os.fork():
        os._exit(0)
    os.wait()
print("written")
"""
PROGRAMS = {
    "python3": ["-c", "import os, multiprocessing; print(os.cpu_count() > 0, 'ok')"],
    "node": ["-e", "const os = require('os'); console.log(os.cpus().length > 0, 'ok')"],
    "git": ["init", "ok"],
    "go": ["version"],
    "ps": ["-eo", "etime,args"],
    "free": ["-m"],
    "nproc": [],
}


async def test_a_note_in_the_kernels_counters_is_not_readable_by_the_next_sandbox(
    backend: local.LocalBackend,
) -> None:
    shown = []
    async with backend.open("host", LIMITS, workdir="/w") as sandbox:
        shown.append(await sandbox.run(["python3", "-c", FILES]))
        written = await sandbox.run(["python3", "-c", NOTE], timeout_s=60)
        assert written.text == "written\n", written.text
        shown.append(await sandbox.run(["python3", "-c", FILES]))
    async with backend.open("host", LIMITS, workdir="/w") as sandbox:
        shown.append(await sandbox.run(["python3", "-c", FILES]))
    lines = [set(result.text.splitlines()) for result in shown]
    assert len(lines[0]) > 20, shown[0].text
    assert lines[0] == lines[1] == lines[2]


@pytest.mark.parametrize("program", PROGRAMS)
async def test_programs_that_read_the_machines_files_run(program: str) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    backend = local.build(local.Options())
    async with backend.open("host", LIMITS, workdir="/w") as sandbox:
        result = await sandbox.run([program, *PROGRAMS[program]], timeout_s=30)
    assert result.exit_code == 0 and result.text, result.text
