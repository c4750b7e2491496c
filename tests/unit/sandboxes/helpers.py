"""Helpers of the sandbox tests."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import SwerlError
from swerl.core.sandbox import Limits, Mount, new_name
from swerl.images.local import image_folder

WORKDIR = "/testbed"
LIMITS = Limits(memory_mib=512, num_processes=64, disk_mib=256, lifetime_s=120)
OUTPUT_CAP_BYTES = 1 << 19
"""Most bytes kept of each of a command's output streams."""


@dataclass(frozen=True, slots=True)
class Target:
    """A backend under test, and an image for it with sh, Python and git."""

    backend: SandboxBackend
    image: str
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Ability that the backend lacks -> reason."""

    def require(self, ability: str) -> None:
        """Skip the test if the backend lacks this ability."""
        if ability in self.lacks:
            pytest.skip(f"{ability}: {self.lacks[ability]}")

    def open(
        self, limits: Limits = LIMITS, mounts: Sequence[Mount] = (), name: str = ""
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox whose workdir is WORKDIR."""
        return self.backend.open(self.image, limits, workdir=WORKDIR, mounts=mounts, name=name)


async def refuse(backend: SandboxBackend, image: str, kind: type[SwerlError]) -> SwerlError:
    """Open a sandbox that cannot be had; return the error, after a look that nothing is left."""
    name = new_name()
    with pytest.raises(kind) as raised:
        async with backend.open(image, LIMITS, workdir=WORKDIR, name=name):
            pass
    assert name not in {live.name for live in await backend.live()}
    assert raised.value.hint, raised.value
    return raised.value


async def sh(sandbox: Sandbox, script: str, **options: object) -> str:
    """Run a shell script that must succeed; return its output."""
    done = await sandbox.run(["sh", "-c", script], timeout_s=20, **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, done
    return done.stdout.decode()


async def processes(sandbox: Sandbox, words: str) -> int:
    """Count the processes with exactly this command line."""
    script = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $f; echo; done | grep -cx \"$0 \""
    return int((await sandbox.run(["sh", "-c", script, words])).stdout)


async def until(sandbox: Sandbox, words: str, count: int) -> None:
    """Wait until this number of processes with this command line runs."""
    async with asyncio.timeout(10):
        while await processes(sandbox, words) != count:  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.005)


def host_processes(words: str) -> set[int]:
    """Return the host's processes with these words on their command line, zombies left out."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:  # noqa: PTH123
                if words.encode() in file.read():
                    found.add(int(name))
        except OSError:
            continue
    return found


async def eventually(true: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.01)


class Echo:
    """A listener that greets every connection with its name."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    async def attach(self, sock: socket.socket) -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(self.name)
            writer.close()

        self.server = await asyncio.start_server(greet, sock=sock)


GREETED = "import socket,sys; h, p = sys.argv[1].split('/')[2].split(':'); "
GREETED += "print(socket.create_connection((h, int(p)), 5).recv(99).decode())"
"""Python that connects to the given URL and prints the answer."""


def write_image(
    name: str,
    layers: Sequence[str | Path],
    binds: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
) -> Path:
    """Write `image.json` of `built:<name>` atomically, and return its folder.

    `layers` are folders, lowest first, relative to the image's folder or absolute. `binds` are
    host folders that the sandbox sees read-only at the same path.
    """
    folder = image_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    body = {"layers": [*map(str, layers)], "binds": [*map(str, binds)], "env": dict(env or {})}
    part = folder / "image.json.part"
    part.write_text(json.dumps(body, indent=2) + "\n")
    part.replace(folder / "image.json")
    return folder
