"""A sandbox that holds nothing back, to check that every attack can succeed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from swerl.core.contracts import Listener, Process
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Exec, Limits, LiveSandbox, Mount, new_name


class WeakBackend:
    """Implements SandboxBackend with processes of this machine, without a wall between."""

    @asynccontextmanager
    async def open(
        self, image: str, _: Limits, *, workdir: str, mounts: Sequence[Mount] = (), name: str = ""
    ) -> AsyncIterator[WeakSandbox]:
        Path(workdir).mkdir(exist_ok=True)
        for mount in mounts:
            Path(mount.target).symlink_to(mount.source)
        leak = os.open("/etc", os.O_RDONLY)
        os.set_inheritable(leak, True)
        try:
            yield WeakSandbox(name or new_name(), workdir)
        finally:
            os.close(leak)
            for mount in mounts:
                Path(mount.target).unlink()

    async def live(self) -> Sequence[LiveSandbox]:
        return []

    async def remove(self, name: str) -> None:
        """Nothing is there to remove."""

    def price(self, limits: Limits) -> float:
        return 0.0


class WeakSandbox:
    """Implements Sandbox."""

    def __init__(self, name: str, workdir: str) -> None:
        self.id = name
        self._workdir = workdir

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
        **_: object,
    ) -> Exec:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=cwd or self._workdir,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                close_fds=False,
            )
            timed_out = False
            try:
                async with asyncio.timeout(timeout_s):
                    await process.communicate(stdin or b"")
            except TimeoutError:
                timed_out = True
                process.terminate()  # a weak hand: what ignores it lives on
            finally:
                if process.returncode is None and not timed_out:
                    process.kill()
            code = 124 if timed_out else process.returncode or 0
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        return Exec(code, *texts, timed_out=timed_out)

    def start(self, argv: Sequence[str], **options: Any) -> AbstractAsyncContextManager[Process]:
        message = "no command streams here"
        raise SandboxError(message)

    async def read(self, path: str) -> bytes:
        done = await self.run(["head", "-c", "200000000", path], timeout_s=3)
        if done.exit_code != 0:
            raise FileNotFoundError(path)
        return done.stdout

    async def write(self, path: str, data: bytes) -> None:
        script = f'mkdir -p "$(dirname {path})"; cat > {path}'
        await self.run(["sh", "-c", script], stdin=data, timeout_s=3)

    async def expose(self, listener: Listener) -> str:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        await listener.attach(sock)
        return f"http://127.0.0.1:{port}"
