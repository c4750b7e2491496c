"""One open sandbox in a container or pod: commands, files and the way to a listener."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import (
    TIMED_OUT,
    CappedOutput,
    Exec,
    Usage,
    file_error,
    new_name,
    require_path,
)
from swerl.sandboxes._docker import create, scripts
from swerl.sandboxes._docker.commands import ContainerCommands
from swerl.sandboxes._docker.container import Container, Machine
from swerl.sandboxes._docker.process import DockerProcess
from swerl.sandboxes._local import kernel
from swerl.sandboxes._relay import open_relay

_FIRST_PORT = 41414
_NO_FILE, _FOLDER = 2, 3
_FILE_TIMEOUT_S = 600.0
_PEAK = "/sys/fs/cgroup/memory.peak"
_SIGXFSZ = 153
_FULL = ("No space left", "File too large", "quota exceeded")


class MachineSandbox:
    """A sandbox in a container or pod."""

    def __init__(self, machine: Machine, cap: int) -> None:
        self.id = machine.name
        self._machine = machine
        self._cap = cap
        self._commands: ContainerCommands
        self._relays = AsyncExitStack()

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
        started = time.monotonic()
        as_root = self._commands.is_root(user)
        process = await self._commands.launch(
            argv, cwd=cwd, env=env, as_root=as_root, with_input=bool(stdin)
        )
        kept = CappedOutput(self._cap)
        code = await self._finish(process, kept, timeout_s, stdin or b"")
        duration_s = time.monotonic() - started
        if code is None:
            return kept.result(TIMED_OUT, duration_s, timed_out=True)
        return kept.result(code, duration_s)

    @asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[DockerProcess]:
        as_root = self._commands.is_root(user)
        process = await self._commands.launch(
            argv, cwd=cwd, env=env, as_root=as_root, with_input=True
        )
        try:
            yield process
        finally:
            try:
                with suppress(SandboxLostError):  # then the command is gone too
                    await asyncio.shield(self._commands.kill(process))
            finally:
                self._commands.forget(process)

    async def read(self, path: str) -> bytes:
        require_path("read", path, self.id)
        code, data, detail = await self._move(scripts.READ, path, b"")
        if code == _NO_FILE:
            raise FileNotFoundError(_NO_FILE, os.strerror(_NO_FILE), path)
        if code:
            raise self._file_error("read", path, code, detail)
        return data

    async def write(self, path: str, data: bytes) -> None:
        require_path("write", path, self.id)
        code, _, detail = await self._move(scripts.WRITE, path, data)
        if code:
            raise self._file_error("write", path, code, detail)

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable by a relay over the stream of a command; return its URL."""
        self._machine.require_alive()
        relay = open_relay(self, listener, on_lost=self._lose)
        return await self._relays.enter_async_context(relay)

    def _lose(self, error: SandboxLostError) -> None:
        self._machine.lose(str(error), from_inside=error.from_inside)

    async def close(self) -> None:
        """Remove the container and release all resources. Safe to call twice."""
        try:
            await self._machine.close()
        finally:
            await self._relays.aclose()

    async def usage(self) -> Usage:
        """Return its peak memory, with cgroup version 2."""
        peak = None
        with suppress(FileNotFoundError, ValueError):
            peak = int(await self.read(_PEAK)) / 2**20
        return Usage(peak_memory_mib=peak)

    async def _finish(
        self, process: DockerProcess, kept: CappedOutput, timeout_s: float | None, stdin: bytes
    ) -> int | None:
        """Follow a command to its end; return its exit code, or None if the timeout ended it."""
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
            await asyncio.shield(self._commands.kill(process))
            with suppress(SandboxLostError):  # the kill failed: the result is still a timeout
                await process.wait()
            await process.collect(kept)
        self._commands.forget(process)
        return code

    async def _move(self, script: str, path: str, data: bytes) -> tuple[int, bytes, str]:
        """Run a script on a file, and again as root if the ordinary user has no permission."""
        target = str(PurePosixPath("/", path))
        users = [False] if self._commands.user_is_root else [False, True]
        for as_root in users:
            kept = CappedOutput(sys.maxsize)
            process = await self._commands.launch(
                ["/bin/sh", "-c", script, "sh", target],
                cwd="/",
                env={"LC_ALL": "C"},
                as_root=as_root,
                with_input=bool(data),
            )
            done = await self._finish(process, kept, _FILE_TIMEOUT_S, data)
            code = TIMED_OUT if done is None else done
            detail = kept.stderr.decode("utf-8", "replace").strip()
            if not (code and "ermission denied" in detail):
                break
        return code, bytes(kept.stdout), detail

    def _file_error(self, verb: str, path: str, code: int, detail: str) -> SandboxError:
        if code == TIMED_OUT:
            message = f"cannot {verb} {path} in sandbox {self.id} in {_FILE_TIMEOUT_S:g} s"
            return SandboxError(message, hint="see the daemon's log")
        full = code == _SIGXFSZ or any(words in detail for words in _FULL)
        hint = "raise the limit disk_mib" if full else ""
        reason = detail.rpartition(": ")[2] or f"code {code}"
        if code == _FOLDER:
            reason = "it is a folder"
        return file_error(verb, path, self.id, reason, is_folder=code == _FOLDER, hint=hint)


class DockerSandbox(MachineSandbox):
    """A container of the `docker` backend."""

    def __init__(self, container: Container, limits: frozenset[str], cap: int) -> None:
        super().__init__(container, cap)
        self.limits = limits
        """Limits in force for the container as a whole: `memory`, `pids`, `cpu`, `disk`."""
        self._container = container
        self.snapshot_root = "/"

    @property
    def pid(self) -> int:
        return self._container.pid

    async def boot(self) -> None:
        """Start the container and wait until it is ready. Raises SandboxError."""
        self._commands = ContainerCommands(self._container, await self._container.boot())

    async def snapshot(self, name: str = "") -> str:
        """Keep its files as an image of the daemon; return the image's name.

        The daemon pauses all processes meanwhile. Mounts and /dev/shm are not kept.
        """
        name = name or new_name()
        image = create.snapshot_image(name)
        api, plan = self._container.api, self._container.plan
        if not await create.image_id(api, image):
            await create.commit(api, self._container.id, plan.image, name)
        return image

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there.

        If this process may enter the container's network, it listens there; otherwise by a relay.
        """
        self._container.require_alive()
        plan, container = self._container.plan, self._container.id
        if plan.has_kernel_network and _runs_here(self.pid, container):
            with suppress(PermissionError):
                return await self._expose_here(listener)
        return await super().expose(listener)

    async def _expose_here(self, listener: Listener) -> str:
        """Listen in the container's network. Raises PermissionError."""
        try:
            sock = await asyncio.to_thread(_listen_in_network, self.pid)
        except PermissionError:
            raise
        except OSError as error:
            await self._container.require_alive_soon()
            raise SandboxError(
                f"cannot listen in the network of sandbox {self.id}: {error.strerror}",
                hint="open a new sandbox",
            ) from error
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await listener.attach(sock)
        return url

    async def usage(self) -> Usage:
        """Return its disk usage, and with cgroup version 2 its peak memory."""
        container = self._container.id
        entries = await self._container.api.call(
            lambda client: client.containers(size=True, filters={"id": container})
        )
        disk = entries[0].get("SizeRw") if entries else None
        return replace(await super().usage(), disk_mib=None if disk is None else disk / 2**20)


async def _follow(
    process: DockerProcess, kept: CappedOutput, timeout_s: float | None
) -> int | None:
    """Read a command's output to its end; return its exit code, or None at the timeout."""
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


def _runs_here(pid: int, container: str) -> bool:
    """Return whether this machine's process `pid` is in the container; the daemon may be remote."""
    try:
        return container in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def _listen_in_network(pid: int) -> socket.socket:
    """Listen on the loopback of the process's network namespace. Raises OSError.

    A namespace belongs to a thread, so a new thread enters it and ends there.
    """
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            made.append(_listen_inside(pid))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="swerl-netns")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _listen_inside(pid: int) -> socket.socket:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.setns(namespace, kernel.NEWNET)
    finally:
        os.close(namespace)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _bind_free(sock)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_free(sock: socket.socket) -> None:
    for port in range(_FIRST_PORT, _FIRST_PORT + 100):
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            continue
        return
    sock.bind(("127.0.0.1", 0))
