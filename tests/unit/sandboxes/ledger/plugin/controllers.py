"""Controllers that wait to be killed: one process imports everything, then forks one a line.

Reads the backend, its settings as JSON and an image; for each line on standard input it starts a
controller in a process group of its own, which opens, uses and closes sandboxes without end, and
prints its pid.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import socket
import sys
from contextlib import suppress

from pydantic import BaseModel

from swerl.core import plugins
from swerl.core.contracts import SandboxBackend
from swerl.core.sandbox import Limits
from swerl.rollout import wiring

_LIMITS = Limits(memory_mib=256, num_processes=32, disk_mib=64, lifetime_s=300)
_AT_ONCE = 2


class Listener:
    """Takes the socket and never answers."""

    async def attach(self, sock: socket.socket) -> None:
        self.sock = sock


async def churn(backend: SandboxBackend, image: str) -> None:
    while True:
        async with backend.open(image, _LIMITS, workdir="/tmp/w") as sandbox:
            await sandbox.expose(Listener())
            await sandbox.run(["sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo >f"])
            await asyncio.sleep(random.random() * 0.05)


async def controller(backend: str, options: BaseModel | None, image: str) -> None:
    opened = wiring.open_backend(backend, options, run="crash")
    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(churn(opened, image))


def main(backend: str, settings: str, image: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
    options = plugins.load("sandboxes", backend).Options(**json.loads(settings))
    if backend != "local":
        importlib.import_module(backend)  # the SDK has its backend's name
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with suppress(BaseException):
                asyncio.run(controller(backend, options, image))
            os._exit(1)
        with suppress(OSError):
            os.setpgid(pid, pid)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
