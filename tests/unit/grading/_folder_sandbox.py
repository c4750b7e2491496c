"""A sandbox for grader tests: real processes in a temporary folder, without isolation."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swerl.core.contracts import Listener, OpenClean, Sandbox
from swerl.core.sandbox import Exec
from swerl.core.task import Task


class FolderSandbox:
    """Runs commands in folders of this machine and counts them."""

    def __init__(self) -> None:
        self.num_runs = 0

    @property
    def id(self) -> str:
        return "folder"

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
        self.num_runs += 1
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate(stdin or b"")
        except TimeoutError:
            os.killpg(process.pid, 9)
            out, err = await process.communicate()
            return Exec(124, out, err, timed_out=True)
        code = process.returncode or 0
        code = code if code >= 0 else 128 - code
        return Exec(code, out, err, duration_s=time.monotonic() - started)

    async def read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    async def write(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    async def expose(self, listener: Listener) -> str:
        raise AssertionError("graders expose nothing")


def opener(task: Task, sandbox: FolderSandbox | None = None) -> OpenClean:
    """Return a function that opens the Task's folder as it is now, one sandbox at a time."""
    one = asyncio.Lock()
    workdir = Path(task.workdir)
    kept = workdir.with_name(f"{workdir.name}.clean")
    if workdir.exists():
        shutil.copytree(workdir, kept, symlinks=True, dirs_exist_ok=True)

    @asynccontextmanager
    async def open_clean() -> AsyncIterator[Sandbox]:
        async with one:
            if kept.exists():
                shutil.rmtree(workdir)
                shutil.copytree(kept, workdir, symlinks=True)
            yield sandbox or FolderSandbox()

    return open_clean
