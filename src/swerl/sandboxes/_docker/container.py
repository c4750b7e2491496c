"""A running container or pod: its start, its end, its signaller; a container's disk usage.

The signaller is a shell in the container (`scripts.SIGNALLER`) that sends signals to a command's
processes. Containers whose storage driver has no quota are measured every few seconds; one whose
files exceed the limit is closed.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Limits
from swerl.sandboxes._docker.api import (
    Api,
    ContainerGoneError,
    ExecStream,
    NameTakenError,
    Stream,
    StreamRefusedError,
    open_stream,
)
from swerl.sandboxes._docker.create import NAME, ContainerPlan, remove
from swerl.sandboxes._docker.process import WaitForExit

_BOOT_TIMEOUT_S = 60.0
_FIRST_PROCESSES = 8
"""Processes and threads that the daemon needs to start a command."""
_LOSS_TIMEOUT_S = 2.0
"""Time after a broken stream in which the daemon may report the container's end."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
"""Pauses between two polls for a command's end; each is twice the one before."""
_MARK_TOP = 1 << 40
_MAX_PENDING_BYTES = 1 << 16
PERIOD_S = 10.0
"""Pause between two measurements of disk usage; a fast writer can exceed its limit in between."""
_REFUSALS = (ContainerGoneError, NameTakenError, StreamRefusedError, SandboxUnavailableError)


class Machine(ABC):
    """A sandbox's container or pod while it lives."""

    def __init__(self, name: str, limits: Limits, workdir: str) -> None:
        self.name = name
        self.limits = limits
        self.workdir = workdir
        self.signaller: Signaller | None = None
        self.lost: asyncio.Future[SandboxLostError] = asyncio.get_running_loop().create_future()
        """Set when it is gone, to the reason."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._removing: asyncio.Task[None] | None = None

    def in_background(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a task that is cancelled when the container is removed."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def require_alive(self) -> None:
        if self.lost.done():
            raise self.lost.result()

    async def require_alive_soon(self, within_s: float = _LOSS_TIMEOUT_S) -> None:
        """Raise SandboxLostError if it is gone, or is reported gone within `within_s`."""
        await asyncio.wait([self.lost], timeout=within_s)
        self.require_alive()

    async def require_running(self) -> None:
        """Raise SandboxLostError if it has ended, reported or not."""
        self.require_alive()

    @abstractmethod
    async def open_exec(self, request: Mapping[str, Any]) -> tuple[ExecStream, WaitForExit]:
        """Start a program in it; return its stream, and a function that waits for its end."""

    async def refusal(self, detail: str) -> SandboxError:
        """Return the error for a command that cannot start."""
        message = f"sandbox {self.name} cannot start a command: {detail.strip()[:300]}"
        hint = "its processes may use up its limits; raise num_processes or memory_mib"
        return SandboxError(message, hint=hint, from_inside=await self._is_crowded(detail))

    async def close(self, reason: str = "it is closed", *, from_inside: bool = False) -> None:
        """Remove it and release all resources. Safe to call twice. Raises SandboxError."""
        self.lose(reason, from_inside=from_inside)
        if self._removing is None:
            self._removing = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._removing)

    def lose(self, reason: str, *, from_inside: bool = False) -> None:
        """Note that it is gone; the first reason counts. See SandboxError for `from_inside`."""
        if not self.lost.done():
            message = f"sandbox {self.name} is gone: {reason}"
            hint = "open a new sandbox"
            self.lost.set_result(SandboxLostError(message, hint=hint, from_inside=from_inside))

    async def _until_ready(self, signaller: Signaller, hint: str) -> SignallerReady:
        self.signaller = signaller
        await asyncio.wait([signaller.ready], timeout=_BOOT_TIMEOUT_S)
        if not signaller.ready.done():
            raise SandboxError(
                f"sandbox {self.name} is not ready after {_BOOT_TIMEOUT_S:.0f} s",
                hint="its machine is busy; open fewer sandboxes at once",
            )
        if ready := signaller.ready.result():
            self.in_background(self._end_in_time())
            return ready
        raise SandboxError(f"sandbox {self.name} ended as it started", hint=hint)

    async def _end_in_time(self) -> None:
        await asyncio.sleep(self.limits.lifetime_s)
        await self.close("its lifetime is over")

    async def _remove(self) -> None:
        try:
            await self._remove_it()
        finally:
            for task in list(self._tasks):
                task.cancel()
            if self.signaller:
                await self.signaller.close()

    @abstractmethod
    async def _is_crowded(self, detail: str) -> bool:
        """Return whether its limits leave too little for a new command."""

    @abstractmethod
    async def _remove_it(self) -> None: ...


class Container(Machine):
    """A created container; `boot` starts it."""

    def __init__(self, api: Api, plan: ContainerPlan, container_id: str) -> None:
        super().__init__(plan.name, plan.limits, plan.workdir)
        self.plan = plan
        self.id = container_id
        self.pid = 0
        """Pid of its init process on the daemon's machine."""
        self.api = api

    async def boot(self) -> SignallerReady:
        """Start it and wait until it is ready. Raises SandboxError."""
        query = "stream=1&stdin=1&stdout=1"
        stream = await self._open(f"/containers/{self.id}/attach?{query}")
        signaller = Signaller(stream, lambda: self.in_background(self._explain_end()))
        await self.api.call(lambda client: client.start(self.id))
        hint = f"swerl's containers need `sh` and `id`: check that image {self.plan.image} has them"
        if not self.plan.has_kernel_network:
            hint = f"{self.plan.runtime} may lack /proc/PID/limits, as gVisor does: use runc"
        ready = await self._until_ready(signaller, hint)
        state = await self.api.call(lambda client: client.inspect_container(self.id))
        self.pid = int(state["State"]["Pid"])
        if not ready.has_workdir:
            await self._make_workdir(ready)
        return ready

    async def open_exec(self, request: Mapping[str, Any]) -> tuple[Stream, WaitForExit]:
        self.require_alive()
        try:
            made = await self.api.call(
                lambda client: client.exec_create(self.id, workdir="/", **request)
            )
            stream = await self._open(f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        except _REFUSALS as error:
            await self.require_alive_soon()
            raise await self.refusal(str(error)) from error
        return stream, partial(self._wait_for_exit, str(made["Id"]))

    async def require_running(self) -> None:
        state = await self.api.call(lambda client: client.inspect_container(self.id))
        if not state["State"]["Running"]:
            await self._explain_end()
        self.require_alive()

    async def _wait_for_exit(self, number: str, _: int | None) -> int:
        """Wait until the daemon reports a command's end, and return its exit code.

        The end of its streams proves nothing: the command itself could have printed it.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                state = await self.api.call(lambda client: client.exec_inspect(number))
            except SandboxError:
                await self.require_alive_soon()
                raise
            if not state["Running"] and state["ExitCode"] is not None:
                return int(state["ExitCode"])
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open(self, path: str, body: Mapping[str, bool] | None = None) -> Stream:
        try:
            return await open_stream(self.api.address, self.api.path(path), body)
        except (OSError, TimeoutError) as error:
            raise SandboxUnavailableError(
                f"the docker daemon does not answer for sandbox {self.name}",
                hint="check it with `docker info`",
            ) from error

    async def _make_workdir(self, ready: SignallerReady) -> None:
        """Make the workdir for the ordinary user, through the daemon: it may change owners."""
        entry = tarfile.TarInfo(self.plan.workdir.strip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        entry.uid, entry.gid = ready.user_id, ready.group_id
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.addfile(entry)
        data = buffer.getvalue()
        await self.api.call(lambda client: client.put_archive(self.id, "/", data))

    async def _is_crowded(self, detail: str) -> bool:
        """Return whether its process limit leaves too little for a new command."""
        try:
            state = await self.api.call(lambda client: client.stats(self.id, stream=False))
        except SandboxError:
            return False
        counted = state.get("pids_stats") or {}
        limit = int(counted.get("limit") or 0)
        return bool(limit) and int(counted.get("current") or 0) > limit - _FIRST_PROCESSES

    async def _explain_end(self) -> None:
        """Find out why the stream of its init process ended, and close it."""
        if self.lost.done():
            return
        try:
            state = await self.api.call(lambda client: client.inspect_container(self.id))
        except ContainerGoneError:
            await self.close("its init process was killed")
        except SandboxError:
            self.lose("the docker daemon no longer answers")
        else:
            full = bool(state["State"].get("OOMKilled"))
            reason = "it ran out of memory" if full else "its init process was killed"
            await self.close(reason, from_inside=full)

    async def _remove_it(self) -> None:
        await remove(self.api, self.id)


@dataclass(frozen=True, slots=True)
class SignallerReady:
    """The first line of the signaller."""

    user_id: int
    group_id: int
    user_name: str
    has_workdir: bool


class Marks:
    """The marks of one sandbox's commands; each is lower than the ones before."""

    def __init__(self) -> None:
        self._last = _MARK_TOP

    def next(self) -> int:
        self._last -= 1
        return self._last

    def request(self, signal: str, mark: int) -> str:
        """Return the request that sends a signal to the processes with this mark."""
        return f"{signal} {mark} {self._last} {_MARK_TOP - 1}"


class Signaller:
    """The controller's connection to a running signaller."""

    def __init__(self, stream: ExecStream, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self.ready: asyncio.Future[SignallerReady | None] = (
            asyncio.get_running_loop().create_future()
        )
        """Its first line; None if it ended before."""
        self._listening = asyncio.ensure_future(self._listen())

    async def send(self, request: str) -> None:
        """Send a request and wait until it is done. Raises ConnectionError."""
        number = next(self._numbers)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = request, done
        try:
            await self._stream.send(f"{number} {request}\n".encode())
            await done
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Close its input: it ends, and its container with it."""
        self._listening.cancel()
        self._stream.close()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        text = b""
        try:
            while read := await self._stream.read():
                *lines, text = (text + read[0]).split(b"\n")
                for line in lines:
                    await self._read(line.decode("ascii", "replace").split())
                text = text[-_MAX_PENDING_BYTES:]
        finally:
            if not self.ready.done():
                self.ready.set_result(None)
            for _, done in self._waiting.values():
                if not done.done():
                    done.set_exception(ConnectionResetError("the signaller is gone"))
                    done.exception()  # the caller may not wait for it
            self._on_end()

    async def _read(self, words: list[str]) -> None:
        if words[:1] == ["ready"] and len(words) == 5:
            if not self.ready.done():
                _, user_id, group_id, name, workdir = words
                ready = SignallerReady(int(user_id), int(group_id), name, workdir == "yes")
                self.ready.set_result(ready)
            # an agent may have killed the signaller before this one, with its requests
            for number, (request, _) in list(self._waiting.items()):
                await self._stream.send(f"{number} {request}\n".encode())
        elif words[:1] == ["done"] and words[1:] and words[1].isdigit():
            _, done = self._waiting.get(int(words[1]), ("", None))
            if done and not done.done():
                done.set_result(None)


class DiskWatch:
    """Closes open sandboxes of one backend whose files exceed their limit."""

    def __init__(self, api: Api, period_s: float = PERIOD_S) -> None:
        self._api = api
        self._period_s = period_s
        self._containers: dict[str, Container] = {}
        self._watching: asyncio.Task[None] | None = None

    def add(self, container: Container) -> None:
        self._containers[container.id] = container
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch())

    def drop(self, container: Container) -> None:
        self._containers.pop(container.id, None)
        if not self._containers and self._watching:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            with suppress(SandboxError):  # other calls report a daemon that does not answer
                await self._measure()

    async def _measure(self) -> None:
        entries = await self._api.call(
            lambda client: client.containers(size=True, filters={"label": NAME})
        )
        for entry in entries:
            container = self._containers.get(entry["Id"])
            if container and entry.get("SizeRw", 0) > container.plan.limits.disk_mib << 20:
                reason = f"its files exceed disk_mib = {container.plan.limits.disk_mib}"
                await container.close(reason, from_inside=True)
