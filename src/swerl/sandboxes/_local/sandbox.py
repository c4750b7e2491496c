"""One open sandbox of the `local` backend."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from swerl.core.chat import Json
from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import (
    ROOT_ENV,
    TIMED_OUT,
    CappedOutput,
    Exec,
    file_error,
    require_path,
)
from swerl.images.layer_copy import copy_changes
from swerl.images.local import snapshot_id, snapshot_of
from swerl.images.store import default_store
from swerl.sandboxes._local import files, limits
from swerl.sandboxes._local.process import Link, LocalSandboxProcess, MakeRequest, launch
from swerl.sandboxes._local.wire import ALL_COMMANDS, Command, SandboxPlan

_THREAD_BYTES = 4 << 20
"""Files of this size or larger are moved in a thread, so that the event loop is not blocked."""
_KILL_TIMEOUT_S = 30.0
_CAPTURE_S = 1800
_HOST_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF})
"""Errors of this process. Code inside can cause every other one, by what it puts at a path; reading
/proc/1/mem, for example, is an input/output error."""
_USERS = {None: False, "agent": False, "1000": False, "root": True, "0": True}


class LocalSandbox:
    """A sandbox on this machine."""

    def __init__(
        self,
        link: Link,
        plan: SandboxPlan,
        env: Mapping[str, str],
        groups: Mapping[str, Path],
    ) -> None:
        """`groups` are the cgroups above the sandbox's own."""
        self.id = plan.id
        self.limits: frozenset[str] = frozenset()
        """Limits in force for it as a whole: `memory`, `pids`, `cpu` (cgroup), `syscalls`."""
        self._link = link
        self._workdir = plan.workdir
        self._disk_bytes = plan.disk_mib << 20
        self._env = env
        self._root = -1
        self._upper = -1
        self._plan = plan
        self._groups = groups
        self.snapshot_root = ""
        """The folder whose files a snapshot keeps: the root, or the workdir of a `dir:` image."""
        self._owner = -1
        """Host user id of its processes."""
        self.pid = 0
        """Host pid of its init process."""

    async def boot(self) -> None:
        """Wait until it is ready. Raises SandboxLostError, or the supervisor's OSError."""
        packet = await self._link.answered(self._link.first)
        body: dict[str, Any] = packet.body
        if "failed" in body:
            raise OSError(body["errno"], body["failed"])
        self._root, self._upper = (*packet.fds, -1)[:2]
        if self._upper >= 0:
            self.snapshot_root = self._workdir if self._plan.content else "/"
        packet.fds.clear()
        self.limits = frozenset(body["limits"])
        if "memory" in self.limits:
            self._link.memory_counts = partial(limits.memory_counts, self._groups, self.id)
        self.pid, self._owner = body["ready"], body["owner"]

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
        request = self._request(argv, cwd, env, user)
        process = await launch(self._link, request, stdin or b"")
        kept = CappedOutput()
        try:
            code, timed_out = await self._finish(process, kept, timeout_s)
        except asyncio.CancelledError:
            # A cancelled caller cannot wait for the end of the command.
            process.kill_now()
            raise
        finally:
            process.close()
        return kept.result(code, time.monotonic() - started, timed_out=timed_out)

    @asynccontextmanager
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[LocalSandboxProcess]:
        process = await launch(self._link, self._request(argv, cwd, env, user))
        try:
            yield process
        finally:
            try:
                with suppress(SandboxLostError):  # then the command is gone too
                    await asyncio.shield(self._kill(process))
            finally:
                process.close()

    async def read(self, path: str) -> bytes:
        self._link.require_alive()
        with self._own_errors("read", path), files.open_file(self._root, path) as file:
            if os.fstat(file.fileno()).st_size < _THREAD_BYTES:
                return files.read_all(file, self._disk_bytes)
            return await asyncio.to_thread(files.read_all, file, self._disk_bytes)

    async def write(self, path: str, data: bytes) -> None:
        self._link.require_alive()
        with self._own_errors("write", path):
            if len(data) < _THREAD_BYTES:
                files.write_file(self._root, path, data, self._owner)
            else:
                await asyncio.to_thread(files.write_file, self._root, path, data, self._owner)

    async def expose(self, listener: Listener) -> str:
        _, answer = await self._link.request(lambda number: {"listen": number}, result="port")
        packet = await self._link.answered(answer)
        await listener.attach(socket.socket(fileno=packet.fds[0]))
        return f"http://127.0.0.1:{packet.body['port']}"

    async def capture(self, dest: Path) -> None:
        """Copy the changes of its overlay to the new host folder `dest`, with whiteouts.

        The overlay is the root of a `built:` image, without /tmp, or the workdir of a `dir:` one.
        Processes inside are stopped meanwhile. Raises SandboxError if the sandbox has no overlay,
        or its files are larger than its disk.
        """
        self._link.require_alive()
        if self._upper < 0:
            raise SandboxError(
                f"sandbox {self.id} has no overlay, so its changes are not recorded",
                hint="capture a sandbox of a `built:` or `dir:` image",
            )
        try:
            async with asyncio.timeout(_CAPTURE_S), self._stopped():
                await self._copy_changes(dest)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"it did not end within {_CAPTURE_S} s"
            raise SandboxError(
                f"cannot capture sandbox {self.id}: {reason[:300]}",
                hint=f"is there space at {dest}?",
            ) from error

    async def _copy_changes(self, dest: Path) -> None:
        stop, source = threading.Event(), os.dup(self._upper)

        def copy() -> None:
            try:
                copy_changes(source, dest, max_bytes=self._disk_bytes, stop=stop)
            finally:
                os.close(source)

        try:
            await asyncio.to_thread(copy)
        finally:
            stop.set()

    @asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        """Stop every process inside meanwhile."""

        def stop(number: int) -> dict[str, Json]:
            return {"signal": signal.SIGSTOP, "command": ALL_COMMANDS, "number": number}

        _, stopped = await self._link.request(stop)
        try:
            await self._link.answered(stopped)
            yield
        finally:
            self._link.send_now({"signal": signal.SIGCONT, "command": ALL_COMMANDS})

    async def snapshot(self, name: str = "") -> str:
        """Keep its changes as a layer in the image store; return the image's reference.

        /tmp, /dev/shm and processes are not kept. Raises SandboxError if the sandbox has no overlay
        or the disk is full.
        """
        store, layer_id = default_store(), snapshot_id(name or secrets.token_hex(16))
        if not store.has_layer(layer_id):
            try:
                note = await asyncio.to_thread(snapshot_of, self._plan.image, self._workdir, name)
                with store.scratch() as folder:
                    await self.capture(folder / "tree")
                    await asyncio.to_thread(store.add_snapshot, folder, layer_id, note)
            except OSError as error:
                raise SandboxError(
                    f"cannot keep a snapshot of sandbox {self.id}: {error}",
                    hint=f"free some space in {store.root}",
                ) from error
        return f"snapshot:{layer_id}"

    async def close(self) -> None:
        """End it; return when none of its processes runs. Safe to call twice."""
        try:
            await self._link.close()
        finally:
            self._link.drop_unread()
            for fd in (self._root, self._upper):
                if fd >= 0:
                    os.close(fd)
            self._root = self._upper = -1

    def _request(
        self, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None, user: str | None
    ) -> MakeRequest:
        if user not in _USERS:
            raise SandboxError(
                f"no user {user!r} in sandbox {self.id}", hint="the users are `agent` and `root`"
            )
        as_root = _USERS[user]
        merged = {**self._env, **(ROOT_ENV if as_root else {}), **(env or {})}
        return lambda number: Command(number, list(argv), cwd or self._workdir, merged, as_root)

    async def _finish(
        self, process: LocalSandboxProcess, kept: CappedOutput, timeout_s: float | None
    ) -> tuple[int, bool]:
        """Return the exit code, and whether the timeout ended the command."""
        try:
            async with asyncio.timeout(timeout_s):
                await process.collect(kept)
                return await process.wait(), False
        except TimeoutError:
            await self._kill(process)
        await process.wait()
        # The output up to the kill still counts.
        await process.collect(kept)
        return TIMED_OUT, True

    async def _kill(self, process: LocalSandboxProcess) -> None:
        """Kill a command. If that fails, close the sandbox and raise SandboxLostError."""
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.kill()
        except SandboxLostError:
            await self.close()
            raise
        except TimeoutError as error:
            await self.close()
            message = f"sandbox {self.id} is gone: a command could not be killed"
            hint = "open a new sandbox"
            raise SandboxLostError(message, hint=hint, from_inside=True) from error

    @contextmanager
    def _own_errors(self, verb: str, path: str) -> Iterator[None]:
        require_path(verb, path, self.id)
        try:
            yield
        except OSError as error:
            if verb == "read" and isinstance(error, FileNotFoundError):
                raise
            reason = error.strerror or str(error)
            if error.errno in _HOST_ERRORS:
                message = f"cannot {verb} {path} in sandbox {self.id}: {reason}"
                raise SandboxError(message, hint="see the kernel's log of this machine") from error
            is_folder = error.errno == errno.EISDIR
            hint = "raise the limit disk_mib" if error.errno == errno.ENOSPC else ""
            raise file_error(verb, path, self.id, reason, is_folder=is_folder, hint=hint) from error
