"""A running container, from its start to its removal."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Coroutine, Mapping
from typing import Any

from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.sandboxes._docker.api import Api, ContainerGoneError, NameTakenError
from swerl.sandboxes._docker.container import Plan, remove
from swerl.sandboxes._docker.hijack import Stream, StreamRefusedError, open_stream
from swerl.sandboxes._docker.keeper import Keeper, Ready

_BOOT_TIMEOUT_S = 60.0
_FIRST_PROCESSES = 8
"""Processes and threads with which the daemon begins a command."""
_LOSS_TIMEOUT_S = 2.0
"""How long after a broken stream the container's own end may become known."""


class Machine:
    """A container that was created, and is started by `boot`."""

    def __init__(self, api: Api, plan: Plan, container: str) -> None:
        self.name = plan.name
        self.plan = plan
        self.container = container
        self.pid = 0
        """The number of its first process where the daemon runs."""
        self.keeper: Keeper
        self.lost: asyncio.Future[SandboxLostError] = asyncio.get_running_loop().create_future()
        """Why it is gone, once it is."""
        self.api = api
        self._chores: set[asyncio.Task[Any]] = set()
        self._removing: asyncio.Task[None] | None = None

    async def boot(self) -> Ready:
        """Start it and wait until it stands. Raises SandboxError."""
        query = "stream=1&stdin=1&stdout=1"
        stream = await self._open(f"/containers/{self.container}/attach?{query}")
        self.keeper = Keeper(stream, lambda: self.do(self._find_out()))
        await self.api.call(lambda client: client.start(self.container))
        ready = await self._until_ready()
        self.do(self._end_in_time())
        told = await self.api.call(lambda client: client.inspect_container(self.container))
        self.pid = int(told["State"]["Pid"])
        if not ready.has_workdir:
            await self._make_workdir(ready)
        return ready

    def do(self, chore: Coroutine[Any, Any, object]) -> None:
        """Do something on the side; its end is not waited for beyond the container's."""
        task = asyncio.ensure_future(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def require_alive(self) -> None:
        """Raise SandboxLostError when it is gone."""
        if self.lost.done():
            raise self.lost.result()

    async def require_alive_soon(self, within_s: float = _LOSS_TIMEOUT_S) -> None:
        """Raise SandboxLostError when it is gone, or turns out to be."""
        await asyncio.wait([self.lost], timeout=within_s)
        self.require_alive()

    async def open_exec(self, request: Mapping[str, Any]) -> tuple[Stream, str]:
        """Start a program in it; return its stream and the daemon's id of it."""
        self.require_alive()
        try:
            made = await self.api.call(
                lambda client: client.exec_create(self.container, workdir="/", **request)
            )
            stream = await self._open(f"/exec/{made['Id']}/start", {"Detach": False, "Tty": False})
        except _REFUSALS as error:
            await self.require_alive_soon()
            raise await self.refusal(str(error)) from error
        return stream, str(made["Id"])

    async def refusal(self, said: str) -> SandboxError:
        """Return the error for a command that could not be started."""
        message = f"sandbox {self.name} cannot start a command: {said.strip()[:300]}"
        hint = "its processes may use up its limits; raise num_processes or memory_mib"
        return SandboxError(message, hint=hint, from_inside=await self._is_crowded())

    async def close(self, reason: str = "it is closed", *, from_inside: bool = False) -> None:
        """Remove it and let go of everything. Safe to call twice. Raises SandboxError."""
        self.lose(reason, from_inside=from_inside)
        if self._removing is None:
            self._removing = asyncio.ensure_future(self._remove())
        await asyncio.shield(self._removing)

    def lose(self, reason: str, *, from_inside: bool = False) -> None:
        """Note that it is gone; the first reason counts. Of `from_inside` see SandboxError."""
        if not self.lost.done():
            message = f"sandbox {self.name} is gone: {reason}"
            hint = "open a fresh sandbox"
            self.lost.set_result(SandboxLostError(message, hint=hint, from_inside=from_inside))

    async def _open(self, path: str, body: Mapping[str, bool] | None = None) -> Stream:
        try:
            return await open_stream(self.api.address, self.api.path(path), body)
        except (OSError, TimeoutError) as error:
            raise SandboxUnavailableError(
                f"the docker daemon does not answer for sandbox {self.name}",
                hint="is it running? `docker info`",
            ) from error

    async def _until_ready(self) -> Ready:
        await asyncio.wait([self.keeper.ready], timeout=_BOOT_TIMEOUT_S)
        if not self.keeper.ready.done():
            raise SandboxError(
                f"sandbox {self.name} does not stand after {_BOOT_TIMEOUT_S:.0f} s",
                hint="the daemon is busy; open fewer at once",
            )
        if ready := self.keeper.ready.result():
            return ready
        message = f"sandbox {self.name} ended as it began"
        hint = f"swerl's containers need `sh` and `id`: does image {self.plan.image} have them?"
        raise SandboxError(message, hint=hint)

    async def _make_workdir(self, ready: Ready) -> None:
        """Make the workdir; only the daemon may give it to the ordinary user."""
        entry = tarfile.TarInfo(self.plan.workdir.strip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        entry.uid, entry.gid = ready.user_id, ready.group_id
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.addfile(entry)
        data = buffer.getvalue()
        await self.api.call(lambda client: client.put_archive(self.container, "/", data))

    async def _is_crowded(self) -> bool:
        """Say whether its processes leave no room for those that a command begins with."""
        try:
            told = await self.api.call(lambda client: client.stats(self.container, stream=False))
        except SandboxError:
            return False
        counted = told.get("pids_stats") or {}
        limit = int(counted.get("limit") or 0)
        return bool(limit) and int(counted.get("current") or 0) > limit - _FIRST_PROCESSES

    async def _find_out(self) -> None:
        """Learn why its first process's stream ended, and clear up."""
        if self.lost.done():
            return
        try:
            told = await self.api.call(lambda client: client.inspect_container(self.container))
        except ContainerGoneError:
            await self.close("its first process was killed")
        except SandboxError:
            self.lose("the docker daemon went away")
        else:
            full = bool(told["State"].get("OOMKilled"))
            reason = "it ran out of memory" if full else "its first process was killed"
            await self.close(reason, from_inside=full)

    async def _end_in_time(self) -> None:
        await asyncio.sleep(self.plan.limits.lifetime_s)
        await self.close("its lifetime is over")

    async def _remove(self) -> None:
        try:
            await remove(self.api, self.container)
        finally:
            for chore in list(self._chores):
                chore.cancel()
            if hasattr(self, "keeper"):
                await self.keeper.close()


_REFUSALS = (ContainerGoneError, NameTakenError, StreamRefusedError, SandboxUnavailableError)
