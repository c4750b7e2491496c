"""A sandbox whose code reaches for every process that starts in it: prints what it took, as JSON.

`python thief.py ISOLATOR SECONDS`: spinning processes, of the agent and of root, open the
newest process of the sandbox while the harness starts commands. Between fork and exec that process
is a copy of the supervisor.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from swerl.core.sandbox import Limits
from swerl.sandboxes import local

SPINNER = r"""
import ctypes, os, sys, time
libc, until, found = ctypes.CDLL(None, use_errno=True), time.time() + float(sys.argv[1]), set()
def newest():
    return max(int(name) for name in os.listdir("/proc") if name.isdigit())
def take(pid):
    # Only a process that is a copy of the supervisor runs Python and is no spinner.
    exe, folder = f"/proc/{pid}/exe", f"/proc/{pid}"
    words = open(folder + "/cmdline").read()
    def is_spinner():  # or one inside exec or at its end, which has no words
        words = open(folder + "/cmdline").read()
        return not words or "SPINNER" in words
    if "swerl-supervisor" in words and "host" in words:
        found.add("image")
    # Its words last: a spinner may have called exec since the first look.
    if "python" not in os.readlink(exe) or is_spinner():
        return
    found.add("program")
    with open(folder + "/mem", "r+b", 0):
        if "python" in os.readlink(exe) and not is_spinner():
            found.add("memory")
    for fd in os.listdir(folder + "/fd"):
        target = os.readlink(f"{folder}/fd/{fd}")
        if int(fd) > 2 and target.startswith(("socket:", "anon_inode:", "/sys", "/proc", "/memfd")):
            found.add("descriptor " + target.split(":")[0])
    own = os.pidfd_open(pid)
    for fd in range(3, 16):
        if libc.syscall(438, own, fd, 0) >= 0:
            found.add("descriptor by pidfd_getfd")
    os.close(own)
def look(pid):
    try:
        take(pid)
    except (OSError, ValueError):
        pass
last = newest()
open(sys.argv[2] + ".ready", "w").close()
while time.time() < until:
    for _ in range(200):
        now = newest()
        if now != last:
            for pid in range(last + 1, now + 1):
                look(pid)
            last = now
        else:
            look(now)
            look(now + 1)
open(sys.argv[2], "w").write("\n".join(sorted(found)))
"""
SIGNALS = r"""
import os
assert os.getppid() == 0
for pid in (0, 1, 2):
    try:
        os.kill(pid, 0 if pid == 0 else 9)
    except OSError:
        pass
"""
EVERYTHING = "import os, signal; os.kill(-1, signal.SIGKILL)"
NUM_SPINNERS = 2


async def steal(seconds: float) -> dict[str, object]:
    """Return what the spinners took, and commands whose result was another than theirs."""
    backend = local.build(local.Options())
    wrong: list[str] = []
    commands = 0
    async with backend.open("host", Limits(memory_mib=512), workdir="/work") as sandbox:
        await sandbox.write("/work/spin.py", SPINNER.encode())
        names = [(user, n) for user in ("agent", "root") for n in range(NUM_SPINNERS)]
        spinners = [
            asyncio.create_task(
                sandbox.run(
                    ["python3", "/work/spin.py", str(seconds), f"/tmp/{user}{n}", "SPINNER"],
                    user=user,
                )
            )
            for user, n in names
        ]
        await asyncio.sleep(1.0)
        until = time.monotonic() + seconds - 1.0
        while time.monotonic() < until:
            for user in ("agent", "root"):
                for program, code in (("true", 0), ("false", 1)):
                    commands += 1
                    done = await sandbox.run([program], user=user, timeout_s=20)
                    if (done.exit_code, done.text) != (code, ""):
                        wrong.append(f"{program} as {user}: {done.exit_code} {done.text}")
        results = [await spinner for spinner in spinners]
        taken = {
            f"{user}: {line}"
            for user, n in names
            for line in (await sandbox.read(f"/tmp/{user}{n}")).decode().splitlines()
        }
        wrong += [f"spinner: {done.text}" for done in results if done.exit_code]
        for user in ("agent", "root"):
            for program in (SIGNALS, EVERYTHING):
                await sandbox.run(["python3", "-c", program], user=user, timeout_s=20)
        answer = await sandbox.run(["echo", "alive"], timeout_s=20)
        if answer.text != "alive\n":
            wrong.append(f"after signals: {answer.exit_code} {answer.text}")
    return {"commands": commands, "taken": sorted(taken), "wrong": wrong}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(steal(float(sys.argv[1])))))
