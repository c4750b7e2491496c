"""One open sandbox of the `docker` backend, as the controller sees it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import PurePosixPath

from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import Exec, Usage
from swerl.sandboxes._docker import netns, scripts
from swerl.sandboxes._docker.commands import Commands
from swerl.sandboxes._docker.machine import Machine
from swerl.sandboxes._docker.output import KeptUntil
from swerl.sandboxes._docker.process import DockerProcess
from swerl.sandboxes._relay import open_relay

TIMED_OUT = 124
_NO_FILE = 2
_FILE_TIMEOUT_S = 600.0
_PEAK = "/sys/fs/cgroup/memory.peak"
_SIGXFSZ = 153
_FULL = ("No space left", "File too large", "quota exceeded")


class DockerSandbox:
    """A container."""

    def __init__(self, machine: Machine, limits: frozenset[str], cap: int) -> None:
        self.id = machine.name
        self.limits = limits
        """Limits that hold for the container as a whole: `memory`, `pids`, `cpu`, `disk`."""
        self._machine = machine
        self._cap = cap
        self._commands: Commands
        self._relays = AsyncExitStack()

    @property
    def pid(self) -> int:
        """The number of its first process where the daemon runs."""
        return self._machine.pid

    async def boot(self) -> None:
        """Start the container and wait until it stands. Raises SandboxError."""
        self._commands = Commands(self._machine, await self._machine.boot())

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
        """Run a command to its end; at the timeout its whole process tree is killed."""
        started = time.monotonic()
        as_root = self._commands.is_root(user)
        process = await self._commands.launch(
            argv, cwd=cwd, env=env, as_root=as_root, with_input=bool(stdin)
        )
        kept = KeptUntil(self._cap)
        code = await self._finish(process, kept, timeout_s, stdin or b"")
        return Exec(
            exit_code=code,
            stdout=bytes(kept.stdout),
            stderr=bytes(kept.stderr),
            timed_out=kept.timed_out,
            truncated=kept.truncated,
            duration_s=time.monotonic() - started,
        )

    @asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[DockerProcess]:
        """Start a command; leaving the context kills it and everything that it started."""
        as_root = self._commands.is_root(user)
        process = await self._commands.launch(
            argv, cwd=cwd, env=env, as_root=as_root, with_input=True
        )
        try:
            yield process
        finally:
            try:
                with suppress(SandboxLostError):  # then the command is gone, too
                    await asyncio.shield(self._commands.kill(process))
            finally:
                self._commands.forget(process)

    async def read(self, path: str) -> bytes:
        """Return a file. Raises FileNotFoundError; a link never leads out of the sandbox."""
        code, data, said = await self._move(scripts.READ, path, b"")
        if code == _NO_FILE:
            raise FileNotFoundError(_NO_FILE, os.strerror(_NO_FILE), path)
        if code:
            raise self._file_error("read", path, code, said)
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its parents; a link never leads out of the sandbox."""
        code, _, said = await self._move(scripts.WRITE, path, data)
        if code:
            raise self._file_error("write", path, code, said)

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there.

        The socket is made inside where this process may enter the container's network; else
        connections come over the stream of a command.
        """
        self._machine.require_alive()
        plan, container = self._machine.plan, self._machine.container
        if plan.has_kernel_network and netns.belongs_to(self.pid, container):
            with suppress(PermissionError):
                return await self._expose_here(listener)
        relay = open_relay(self, listener, on_lost=self._lose)
        return await self._relays.enter_async_context(relay)

    def _lose(self, error: SandboxLostError) -> None:
        self._machine.lose(str(error), from_inside=error.from_inside)

    async def _expose_here(self, listener: Listener) -> str:
        """Hand over a socket from the container's network. Raises PermissionError."""
        try:
            sock = await asyncio.to_thread(netns.listen, self.pid)
        except PermissionError:
            raise
        except OSError as error:
            await self._machine.require_alive_soon()
            raise SandboxError(
                f"cannot listen in the network of sandbox {self.id}: {error.strerror}",
                hint="open a fresh sandbox",
            ) from error
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await listener.attach(sock)
        return url

    async def close(self) -> None:
        """Remove the container and let go of everything. Safe to call twice."""
        try:
            await self._machine.close()
        finally:
            await self._relays.aclose()

    async def usage(self) -> Usage:
        """Return what it took from its start on; memory is told with cgroup version 2."""
        container = self._machine.container
        entries = await self._machine.api.call(
            lambda client: client.containers(size=True, filters={"id": container})
        )
        disk = entries[0].get("SizeRw") if entries else None
        peak = None
        with suppress(FileNotFoundError, ValueError):
            peak = int(await self.read(_PEAK)) / 2**20
        return Usage(peak_memory_mib=peak, disk_mib=None if disk is None else disk / 2**20)

    async def _finish(
        self, process: DockerProcess, kept: KeptUntil, timeout_s: float | None, stdin: bytes
    ) -> int:
        """Follow a command to its end; return its exit code, or the timeout's."""
        feeding = asyncio.ensure_future(_feed(process, stdin)) if stdin else None
        try:
            code = await _follow(process, kept, timeout_s)
        except asyncio.CancelledError:
            self._commands.kill_soon(process)
            raise
        finally:
            if feeding:
                feeding.cancel()
        if code is None:
            kept.timed_out, code = True, TIMED_OUT
            await asyncio.shield(self._commands.kill(process))
            with suppress(SandboxLostError):  # it defied the kill: still a timeout, no fault here
                await process.wait()
            await process.collect(kept)
        self._commands.forget(process)
        return code

    async def _move(self, script: str, path: str, data: bytes) -> tuple[int, bytes, str]:
        """Run a script on a file, as root where the ordinary user may not."""
        target = str(PurePosixPath("/", path))
        users = [False] if self._commands.user_is_root else [False, True]
        for as_root in users:
            kept = KeptUntil(sys.maxsize)
            process = await self._commands.launch(
                ["/bin/sh", "-c", script, "sh", target],
                cwd="/",
                env={"LC_ALL": "C"},
                as_root=as_root,
                with_input=bool(data),
            )
            code = await self._finish(process, kept, _FILE_TIMEOUT_S, data)
            said = kept.stderr.decode("utf-8", "replace").strip()
            if not (code and "ermission denied" in said):
                break
        return code, bytes(kept.stdout), said

    def _file_error(self, verb: str, path: str, code: int, said: str) -> SandboxError:
        full = code == _SIGXFSZ or any(words in said for words in _FULL)
        hint = "raise the limit disk_mib" if full else "name a plain file in a writable folder"
        reason = said.rpartition(": ")[2] or f"code {code}"
        return SandboxError(f"cannot {verb} {path} in sandbox {self.id}: {reason}", hint=hint)


async def _follow(process: DockerProcess, kept: KeptUntil, timeout_s: float | None) -> int | None:
    """Read a command's output to its end; return its exit code, None where it took too long."""
    try:
        async with asyncio.timeout(timeout_s):
            await process.collect(kept)
            return await process.wait()
    except TimeoutError:
        if not await process.ended_in_time():
            return None
        await process.collect(kept)
        return await process.wait()


async def _feed(process: DockerProcess, data: bytes) -> None:
    with suppress(SandboxError):  # it closed its input
        await process.send(data)
        await process.end_input()
