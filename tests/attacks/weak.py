"""A sandbox that holds nothing back, to check that every attack can succeed."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swerl.core.sandbox import Exec, Limits, Mount, new_name


class WeakBackend:
    """Runs processes of this machine, without a wall between."""

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
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
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
    ) -> Exec:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd or self._workdir,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,
        )
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin or b"")
        return Exec(process.returncode or 0, out, err)
