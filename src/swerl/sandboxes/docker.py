"""The `docker` sandbox: a container of a Docker daemon, without a network.

The daemon makes and removes the container. The container's first process reads from the
controller's connection, so it ends with the controller; the daemon then removes the rest.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import sys
import tarfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from swerl.core.contracts import Listener
from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount, new_name
from swerl.sandboxes import _docker_container as containers
from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes._docker_container import ContainerPlan
from swerl.sandboxes._docker_daemon import ContainerGoneError, Daemon, NameTakenError, Stream
from swerl.sandboxes._machine import (
    LOSS_TIMEOUT_S,
    NAME,
    ExecRequest,
    MachineSandbox,
    SignallerReady,
    WaitForExit,
)

_NAMESPACE_RUNTIMES = ("runc", "crun", "youki")
"""OCI runtimes whose containers are namespaces; others, such as gVisor, have their own network."""
_MEASURE_S = 10.0
"""Pause between two measurements of disk usage; a fast writer can exceed its limit in between."""
_FIRST_PROCESSES = 8
"""Processes and threads that the daemon needs to start a command."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
"""Pauses between two polls for a command's end; each is twice the one before."""
_FIRST_PORT = 41414


class Options(BaseModel):
    """Settings of the `docker` sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = ""
    """The daemon, `unix:///…` or `tcp://host:port`; empty: the one that `docker` uses."""
    runtime: str = ""
    """OCI runtime, such as `crun`; empty: the daemon's default."""
    user: str = ""
    """Ordinary user of the containers, by name or number; empty: the image's own."""


def build(options: Options) -> DockerBackend:
    """Return the backend. It connects to the daemon when the first sandbox is opened."""
    return DockerBackend(options)


class DockerBackend:
    """Makes containers with one daemon."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._daemon = Daemon(options.base_url)
        self._watched: dict[str, DockerSandbox] = {}
        """Open sandboxes by container."""
        self._watching: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[DockerSandbox]:
        daemon, options = self._daemon, self._options
        name = name or new_name()
        await daemon.connect()
        runtime = options.runtime or daemon.info.get("DefaultRuntime") or "runc"
        plan = ContainerPlan(
            name=name,
            image=image,
            limits=limits,
            workdir=workdir,
            mounts=tuple(mounts),
            runtime=options.runtime,
            user=options.user,
            has_kernel_network=any(kind in runtime for kind in _NAMESPACE_RUNTIMES),
        )
        try:
            container = await containers.create(daemon, plan)
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.shield(self.remove(name))
            raise
        sandbox = DockerSandbox(daemon, plan, container)
        self._watch(sandbox)
        try:
            await sandbox.boot()
            yield sandbox
        finally:
            self._unwatch(sandbox)
            has_failed = sys.exception() is not None
            try:
                await asyncio.shield(sandbox.close())
            except SandboxUnavailableError:  # the error that ends the block explains more
                if not has_failed:
                    raise

    async def live(self) -> Sequence[LiveSandbox]:
        return [
            LiveSandbox(
                name=container["Labels"][NAME],
                id=container["Id"],
                image=container["Image"],
                started_unix_s=float(container["Created"]),
            )
            for container in await self._list(NAME)
        ]

    async def remove(self, name: str) -> None:
        for container in await self._list(f"{NAME}={name}"):
            await containers.remove(self._daemon, container["Id"])

    def price(self, limits: Limits) -> float:
        return 0.0

    async def _list(self, label: str) -> list[dict[str, Any]]:
        await self._daemon.connect()
        return await self._daemon.call(
            lambda client: client.containers(all=True, filters={"label": label})
        )

    def _watch(self, sandbox: DockerSandbox) -> None:
        self._watched[sandbox.container] = sandbox
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._measure())

    def _unwatch(self, sandbox: DockerSandbox) -> None:
        self._watched.pop(sandbox.container, None)
        if self._watching and not self._watched:
            self._watching.cancel()
            self._watching = None

    async def _measure(self) -> None:
        """End sandboxes whose files together exceed their limit."""
        while True:
            await asyncio.sleep(_MEASURE_S)
            with suppress(SandboxError):  # other calls report a daemon that does not answer
                sizes = await self._daemon.call(
                    lambda client: client.containers(size=True, filters={"label": NAME})
                )
                for container in sizes:
                    if sandbox := self._watched.get(container["Id"]):
                        await sandbox.check_disk(container.get("SizeRw", 0))


class DockerSandbox(MachineSandbox):
    """A created container; `boot` starts it."""

    def __init__(self, daemon: Daemon, plan: ContainerPlan, container: str) -> None:
        super().__init__(plan.name, plan.limits, plan.workdir)
        self.container = container
        """The daemon's id of it."""
        self.limits = frozenset(daemon.limits)
        """Limits in force for the container as a whole: `memory`, `pids`, `cpu`."""
        self.pid = 0
        """Pid of its first process on the daemon's machine."""
        self._daemon = daemon
        self._plan = plan

    async def boot(self) -> None:
        """Start the container and wait until it is ready. Raises SandboxError."""
        params = {"stream": 1, "stdin": 1, "stdout": 1}
        stream = await self._daemon.stream(
            lambda client: client.attach_socket(self.container, params=params)
        )
        await self._daemon.call(lambda client: client.start(self.container))
        hint = f"swerl's containers need `sh` and `id`: check image {self._plan.image}"
        if not self._plan.has_kernel_network:
            hint = f"{self._plan.runtime} may lack /proc/PID/limits, as old gVisor does: use runc"
        ready = await self._until_ready(stream, hint)
        self.pid = int((await self._inspect())["State"]["Pid"])
        if not ready.has_workdir:
            await self._make_workdir(ready)

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there.

        If this process may enter the container's network, it listens there; otherwise by a relay.
        """
        self._require_alive()
        if self._plan.has_kernel_network and _runs_here(self.pid, self.container):
            with suppress(PermissionError):
                return await self._expose_here(listener)
        return await super().expose(listener)

    async def check_disk(self, size: int) -> None:
        """End it if its files exceed their limit."""
        if size > self._limits.disk_mib << 20:
            reason = f"its files exceed disk_mib = {self._limits.disk_mib}"
            await self._end(reason, from_inside=True)

    async def _expose_here(self, listener: Listener) -> str:
        """Listen in the container's network. Raises PermissionError."""
        try:
            sock = await asyncio.to_thread(_listen_in_network, self.pid)
        except PermissionError:
            raise
        except OSError as error:
            await self._require_alive_soon(LOSS_TIMEOUT_S)
            raise SandboxError(
                f"cannot listen in the network of sandbox {self.id}: {error.strerror}",
                hint="open a new sandbox",
            ) from error
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        await listener.attach(sock)
        return url

    async def _open_exec(self, request: ExecRequest) -> tuple[Stream, WaitForExit]:
        self._require_alive()
        command = ["/bin/sh", "-c", request.script, "swerl", *request.words]
        try:
            process = await self._daemon.call(
                lambda client: client.exec_create(
                    self.container,
                    command,
                    stdin=True,
                    environment=dict(request.environment),
                    user="root" if request.as_root else "",
                    workdir="/",
                )
            )
            stream = await self._daemon.stream(
                lambda client: client.exec_start(process["Id"], socket=True)
            )
        except (ContainerGoneError, NameTakenError, SandboxUnavailableError) as error:
            await self._require_alive_soon()
            raise await self._refusal(str(error)) from error
        return stream, lambda _: self._wait_for_exit(str(process["Id"]))

    async def _wait_for_exit(self, number: str) -> int:
        """Wait until the daemon reports a command's end, and return its exit code."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                state = await self._daemon.call(lambda client: client.exec_inspect(number))
            except SandboxError:
                await self._require_alive_soon()
                raise
            if not state["Running"] and state["ExitCode"] is not None:
                return int(state["ExitCode"])
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _inspect(self) -> dict[str, Any]:
        return await self._daemon.call(lambda client: client.inspect_container(self.container))

    async def _require_running(self) -> None:
        if not (await self._inspect())["State"]["Running"]:
            await self._explain_end()
        self._require_alive()

    async def _make_workdir(self, ready: SignallerReady) -> None:
        """Make the workdir for the ordinary user, through the daemon: it may change owners."""
        entry = tarfile.TarInfo(self._workdir.strip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        entry.uid, entry.gid = ready.user_id, ready.group_id
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            tar.addfile(entry)
        await self._daemon.call(
            lambda client: client.put_archive(self.container, "/", buffer.getvalue())
        )

    async def _is_crowded(self, detail: str) -> bool:
        """Return whether its process limit leaves too little for a new command."""
        try:
            state = await self._daemon.call(
                lambda client: client.stats(self.container, stream=False)
            )
        except SandboxError:
            return False
        counts = state.get("pids_stats") or {}
        limit = int(counts.get("limit") or 0)
        return bool(limit) and int(counts.get("current") or 0) > limit - _FIRST_PROCESSES

    async def _explain_end(self) -> None:
        if self._lost.done():
            return
        try:
            state = (await self._inspect())["State"]
        except ContainerGoneError:
            await self._end("its init process was killed")
        except SandboxError:
            self._lose("the docker daemon no longer answers")
        else:
            is_full = bool(state.get("OOMKilled"))
            reason = "it ran out of memory" if is_full else "its init process was killed"
            await self._end(reason, from_inside=is_full)

    async def _remove_machine(self) -> None:
        await containers.remove(self._daemon, self.container)


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
    results: list[socket.socket | OSError] = []

    def listen() -> None:
        try:
            results.append(_listen_inside(pid))
        except OSError as error:
            results.append(error)

    thread = threading.Thread(target=listen, name="swerl-netns")
    thread.start()
    thread.join()
    if isinstance(results[0], OSError):
        raise results[0]
    return results[0]


def _listen_inside(pid: int) -> socket.socket:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.setns(namespace, kernel.NEWNET)
    finally:
        os.close(namespace)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for port in (*range(_FIRST_PORT, _FIRST_PORT + 100), 0):
        with suppress(OSError):
            sock.bind(("127.0.0.1", port))
            break
    try:
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock
