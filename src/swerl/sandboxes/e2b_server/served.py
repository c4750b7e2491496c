"""The sandboxes that clients created: a task holds each one until its time is over."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.core.contracts import Sandbox, SandboxBackend, SnapshotSandbox
from swerl.core.errors import SwerlError
from swerl.core.sandbox import Limits, Mount, SandboxOrder, new_name
from swerl.images.ondemand import WrappedBackend
from swerl.sandboxes.e2b_server import access
from swerl.sandboxes.e2b_server.failure import Code, WireError, gone, why
from swerl.sandboxes.e2b_server.folders import Folders
from swerl.sandboxes.e2b_server.processes import Processes, wait_ready
from swerl.sandboxes.e2b_server.watchers import Watchers

_LOG = logging.getLogger(__name__)
PREPARED = "swerl-prepared-"
"""How the references of prepared snapshots begin."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server; clients cannot change them."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default, because the key lets its holder run commands
    here."""
    port: int = 49000
    """Port to listen on; 0 takes a free one."""
    socket: Path | None = None
    """Unix socket to listen on in place of a port; only this user may connect to it."""
    certificate: Path | None = None
    """PEM file of a key and its certificate, for TLS. None: plain HTTP."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Template id -> image. An id that is absent here is an image reference itself."""
    image_key: str = "image"
    """Metadata key that names the image in place of the template, as slime's clients do."""
    workdir: str = "/home/user"
    """Working folder of commands and base of relative paths; E2B's own templates use it."""
    limits: Limits = field(default_factory=Limits)
    """Limits of each sandbox. `max_lifetime_s` replaces their `lifetime_s`."""
    max_lifetime_s: float = 86400.0
    """Longest life that a client may request, in seconds; 24 h is E2B's own bound."""
    max_sandboxes: int = 256
    """Sandboxes at once; more are refused with 429, which the SDK retries."""
    max_file_mib: int = 512
    """Largest file that can be sent, in MiB: a file is held in memory while it moves."""
    takes_orders: bool = False
    """True if a client may order a whole sandbox (`core.sandbox.SandboxOrder`): its limits, and
    folders of this machine as its image and mounts. For a server whose only client is its
    operator."""


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """The arguments of a client's create call."""

    template: str
    image: str
    timeout_s: float
    metadata: Mapping[str, str]
    env: Mapping[str, str]
    idempotency_key: str = ""
    order: SandboxOrder | None = None
    """The rest of the sandbox, if the server takes orders."""
    auto_pause: bool = False
    """True if the end of its time pauses the sandbox."""

    def of_snapshot(self, made: ServedSnapshot, timeout_s: float) -> SandboxRequest:
        """Return the request for another sandbox with the files of a snapshot."""
        order = self.order and replace(self.order, image=made.image)
        return replace(self, image=made.image, timeout_s=timeout_s, idempotency_key="", order=order)


class ServedSandboxes:
    """All sandboxes of a server."""

    def __init__(self, backend: SandboxBackend, options: ServerOptions) -> None:
        self.backend = backend
        self._options = options
        self._holders: dict[str, _Holder] = {}
        self._ended_inside: set[str] = set()
        """Ids of the sandboxes that a program inside has ended."""
        self._closed = False
        self.snapshots: dict[str, ServedSnapshot] = {}
        """Template id -> a snapshot that a client took."""
        self.prepared = PreparedSnapshots(self, options)
        self.paused: dict[str, ServedSandbox] = {}
        """Id -> a sandbox that ended and can resume with its files."""
        self._dropped: set[str] = set()
        """Names of removed snapshots whose files sandboxes may still use."""

    def all(self) -> list[ServedSandbox]:
        """Return the running ones, the oldest first."""
        found = [holder.served for holder in self._holders.values()]
        return [served for served in found if self._is_usable(served)]

    def find(self, sandbox_id: str) -> ServedSandbox | None:
        """Return the running one of this id, or None; a suffix that old SDKs append is ignored."""
        holder = self._holders.get(sandbox_id.partition("-")[0])
        return holder.served if holder and self._is_usable(holder.served) else None

    def _is_usable(self, served: ServedSandbox) -> bool:
        return served.runs and served.id not in self.paused

    def find_paused(self, sandbox_id: str) -> ServedSandbox | None:
        return self.paused.get(sandbox_id.partition("-")[0])

    def require(self, sandbox_id: str) -> ServedSandbox:
        """Return the running one of this id. Raises WireError: paused, or not found."""
        if served := self.find(sandbox_id):
            return served
        if self.find_paused(sandbox_id):
            message = f"sandbox {sandbox_id[:64]} is paused: connect to it first"
            raise WireError(Code.FAILED_PRECONDITION, message, status=409)
        cause = why(sandbox_id in self._ended_inside)
        raise WireError(Code.NOT_FOUND, f"Sandbox {sandbox_id[:64]!r} was not found{cause}")

    def open_with(self, sandbox_id: str, token: str) -> ServedSandbox:
        """Return the sandbox that this token opens. Raises WireError: gone, or unauthenticated.

        Without an id the token identifies it: some SDKs send no id after they have connected.
        """
        served = self.find(sandbox_id)
        if sandbox_id and served is None:
            raise gone(sandbox_id[:64], from_inside=sandbox_id in self._ended_inside)
        for candidate in [served] if served else self.all():
            if access.same(token, candidate.token):
                return candidate
        raise WireError(Code.UNAUTHENTICATED, "the sandbox's access token is missing or wrong")

    def open_port_with(self, sandbox_id: str, traffic_token: str, token: str) -> ServedSandbox:
        """Return the sandbox whose ports a token opens. Raises WireError as `open_with` does."""
        served = self.find(sandbox_id)
        if served and access.same(traffic_token, served.traffic_token):
            return served
        return self.open_with(sandbox_id, token)

    async def create(
        self, request: SandboxRequest, earlier: ServedSandbox | None = None
    ) -> ServedSandbox:
        """Create a sandbox, or return the one that an equal request with the same key created.

        It takes the id and the tokens of an `earlier` one, which has ended.
        """
        if holder := self._made_by(request):
            await asyncio.wait([holder.task, holder.ready], return_when=asyncio.FIRST_COMPLETED)
            if holder.served.runs:
                return holder.served
        if self._closed:
            raise WireError(Code.UNAVAILABLE, "the server is stopping")
        if len(self._holders) >= self._options.max_sandboxes:
            message = f"the limit of {len(self._holders)} sandboxes is reached"
            raise WireError(Code.RESOURCE_EXHAUSTED, message)
        order, options = request.order, self._options
        if order:
            served = ServedSandbox(request, order.limits, order.workdir, earlier)
        else:
            limits = replace(options.limits, lifetime_s=options.max_lifetime_s)
            served = ServedSandbox(request, limits, options.workdir, earlier)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._hold(served, ready))
        self._holders[served.id] = _Holder(served, task, ready)
        task.add_done_callback(lambda _: self._holders.pop(served.id))
        try:
            await wait_ready(task, ready)
        except asyncio.CancelledError:
            served.end()  # its client is gone and never learned its id
            raise
        return served

    async def snapshot(self, served: ServedSandbox, name: str = "") -> ServedSnapshot:
        """Keep a sandbox's files as a template of this server. Raises WireError."""
        sandbox = _require_snapshots(served)
        if name in self.snapshots or name in self._options.templates:
            message = f"there is a template {name[:100]!r} already"
            raise WireError(Code.FAILED_PRECONDITION, message, status=409)
        if len(self.snapshots) >= self._options.max_sandboxes:
            message = f"the limit of {len(self.snapshots)} snapshots is reached: delete some"
            raise WireError(Code.RESOURCE_EXHAUSTED, message)
        key = new_name()  # with it `reap` finds what a killed server left
        made = ServedSnapshot(name or access.new_sandbox_id(), key, served)
        # Listed before it exists, so that the end of the server removes it in any case.
        self.snapshots[made.id] = made
        try:
            made.image = await sandbox.snapshot(key)
            if self._closed:
                raise WireError(Code.UNAVAILABLE, "the server is stopping")
        except BaseException:
            await self.drop_snapshot(made)
            raise
        return made

    async def drop_snapshot(self, made: ServedSnapshot) -> None:
        """Remove a snapshot; if a sandbox uses it, its files go when the server closes."""
        self.snapshots.pop(made.id, None)
        self._dropped.add(made.key)
        await self._drop()

    async def pause(self, served: ServedSandbox) -> None:
        """Keep a sandbox's files until it resumes, and end it. Raises WireError."""
        await self._keep(served)
        await self._end(served)

    async def _keep(self, served: ServedSandbox) -> None:
        if len(self.paused) >= self._options.max_sandboxes:
            message = f"the limit of {len(self.paused)} paused sandboxes is reached: kill some"
            raise WireError(Code.RESOURCE_EXHAUSTED, message)
        self.paused[served.id] = served  # from here on, no client may change its files
        try:
            made = await self.snapshot(served)
        except BaseException:
            self.paused.pop(served.id, None)
            raise
        if served.id in self.paused:
            served.kept = self.snapshots.pop(made.id)
        else:  # it was removed meanwhile
            await self.drop_snapshot(made)

    async def resume(self, served: ServedSandbox, timeout_s: float) -> ServedSandbox:
        """Create a paused sandbox again, with its files, id and tokens. Raises WireError."""
        async with served.resuming:
            if self.paused.get(served.id) is not served:
                return self.require(served.id)
            if served.kept is None:
                message = f"sandbox {served.id} is being paused"
                raise WireError(Code.UNAVAILABLE, message)
            await self._end(served)
            wanted = served.created.of_snapshot(served.kept, timeout_s)
            created = await self.create(wanted, served)
            del self.paused[served.id]
            await self.drop_snapshot(served.kept)
            return created

    async def _drop(self) -> None:
        backend = WrappedBackend(self.backend)
        for key in [*self._dropped]:
            await backend.drop_snapshot(key)
            if not await backend.find_snapshot(key):
                self._dropped.discard(key)

    async def remove(self, served: ServedSandbox) -> None:
        """Remove a running or paused sandbox; return once it is gone."""
        async with served.resuming:
            if self.paused.pop(served.id, None) and served.kept:
                await self.drop_snapshot(served.kept)
            await self._end(served)

    async def _end(self, served: ServedSandbox) -> None:
        served.end()
        if holder := self._holders.get(served.id):
            await asyncio.wait([holder.task])

    async def close(self) -> None:
        """Remove all sandboxes, and create no more."""
        self._closed = True
        holders = list(self._holders.values())
        for holder in holders:
            holder.served.end()
            if not holder.ready.done():
                holder.task.cancel()
        await asyncio.gather(*(holder.task for holder in holders), return_exceptions=True)
        kept = [served.kept for served in self.paused.values() if served.kept]
        kept += [*self.snapshots.values(), *self.prepared.end()]
        self._dropped |= {made.key for made in kept}
        self.snapshots.clear()
        self.paused.clear()
        with suppress(SwerlError):
            await self._drop()

    def _made_by(self, request: SandboxRequest) -> _Holder | None:
        if not request.idempotency_key:
            return None
        for holder in self._holders.values():
            earlier, is_alive = holder.served.created, holder.served.runs or not holder.ready.done()
            if is_alive and earlier.idempotency_key == request.idempotency_key:
                if earlier != request:
                    message = "this idempotency key belongs to a different request"
                    raise WireError(Code.FAILED_PRECONDITION, message, status=409)
                return holder
        return None

    async def _hold(self, served: ServedSandbox, ready: asyncio.Future[None]) -> None:
        """Hold a sandbox open until its time is over."""
        mounts = _existing(served.created.order.mounts) if served.created.order else ()
        opened = self.backend.open(
            served.created.image, served.limits, workdir=served.workdir, mounts=mounts
        )
        try:
            async with opened as sandbox:
                served.attach(sandbox)
                _LOG.info("sandbox %s of %s is running", served.id, served.created.image)
                ready.set_result(None)
                await self._until_over(served)
        except SwerlError as error:
            if not ready.done():
                raise
            _LOG.warning("sandbox %s was not removed cleanly: %s", served.id, error)
        finally:
            if ready.done():
                await served.processes.close()
                _LOG.info("sandbox %s is gone", served.id)

    async def _until_over(self, served: ServedSandbox) -> None:
        try:
            await served.over()
            if served.runs and served.created.auto_pause:
                await self._keep(served)
        except SwerlError as error:
            _LOG.warning("sandbox %s ends, because it cannot be paused: %s", served.id, error)
        finally:
            served.end()
            if served.from_inside:
                self._ended_inside.add(served.id)
            served.processes.stop(from_inside=served.from_inside)
            await served.watchers.close()


def _require_snapshots(served: ServedSandbox) -> SnapshotSandbox:
    """Return the sandbox, if a snapshot of it can be taken. Raises WireError."""
    sandbox = served.sandbox
    if isinstance(sandbox, SnapshotSandbox) and sandbox.snapshot_root:
        return sandbox
    message = "snapshots need `local` sandboxes of an image or folder, or `docker`"
    raise WireError(Code.UNIMPLEMENTED, message)


class PreparedSnapshots(WrappedBackend):
    """Snapshots that swerl's own clients take and find by names, apart from those of E2B's clients.

    Nobody can list them, and their references are random. They end with the server, and only those
    used last stay. On a run's own server they are the backend's and outlive the server.
    """

    def __init__(self, sandboxes: ServedSandboxes, options: ServerOptions) -> None:
        super().__init__(sandboxes.backend)
        self._sandboxes = sandboxes
        self._options = options
        self._made: dict[str, ServedSnapshot] = {}
        """Name -> snapshot; the last used last."""

    def find(self, reference: str) -> ServedSnapshot | None:
        return next((made for made in self._made.values() if made.id == reference), None)

    def end(self) -> list[ServedSnapshot]:
        """Forget all, and return them."""
        made, self._made = list(self._made.values()), {}
        return made

    async def take(self, served: ServedSandbox, name: str) -> str:
        """Keep a sandbox's files; return the reference. A name that has a snapshot keeps it."""
        if self._options.takes_orders:
            return await _require_snapshots(served).snapshot(name)
        made = await self._sandboxes.snapshot(served, PREPARED + access.new_sandbox_id())
        del self._sandboxes.snapshots[made.id]
        if found := self._made.get(name):  # another client was faster
            await self._sandboxes.drop_snapshot(made)
            return found.id
        self._made[name] = made
        if len(self._made) > self._options.max_sandboxes:
            await self.drop_snapshot(next(iter(self._made)))
        return made.id

    async def find_snapshot(self, name: str) -> str:
        if self._options.takes_orders:
            return await super().find_snapshot(name)
        if made := self._made.pop(name, None):
            self._made[name] = made
            return made.id
        return ""

    async def drop_snapshot(self, name: str) -> None:
        if self._options.takes_orders:
            await super().drop_snapshot(name)
        elif made := self._made.pop(name, None):
            await self._sandboxes.drop_snapshot(made)


def _existing(mounts: Sequence[Mount]) -> list[Mount]:
    """Return the mounts that exist on this machine; the client uploads the others."""
    return [mount for mount in mounts if mount.source.is_dir()]


@dataclass(slots=True)
class ServedSnapshot:
    """A snapshot that a client took; it ends with the server."""

    id: str
    key: str
    """Its name at the backend; clients do not learn it."""
    served: ServedSandbox
    """The sandbox of which it was taken."""
    image: str = ""
    """Reference of its image; empty until it is whole."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """The task that holds a sandbox open."""

    served: ServedSandbox
    task: asyncio.Task[None]
    ready: asyncio.Future[None]
    """Done once the sandbox runs."""


class ServedSandbox:
    """One sandbox, with its token, deadline, commands and watchers."""

    def __init__(
        self,
        request: SandboxRequest,
        limits: Limits,
        workdir: str,
        earlier: ServedSandbox | None = None,
    ) -> None:
        self.id: str = earlier.id if earlier else access.new_sandbox_id()
        self.token: str = earlier.token if earlier else access.new_token()
        """Opens everything in it."""
        self.traffic_token: str = earlier.traffic_token if earlier else access.new_token()
        """Opens only the servers inside, so their users may have it."""
        self.created = request
        self.limits = limits
        self.workdir = workdir
        self.started_unix_s = time.time()
        self.sandbox: Sandbox
        self.folders: Folders
        self.processes: Processes
        self.watchers: Watchers
        self.runs = False
        """True while clients can use it."""
        self.from_inside = False
        """True if a program inside ended it."""
        self.kept: ServedSnapshot | None = None
        """Its files, if it is paused."""
        self.resuming = asyncio.Lock()
        self._deadline_s = 0.0
        self._last_s = math.inf
        self._changed = asyncio.Event()
        self.live_for(request.timeout_s)

    @property
    def end_unix_s(self) -> float:
        """Unix time at which its time is over."""
        return time.time() + self.left_s

    @property
    def left_s(self) -> float:
        """Seconds until its time is over."""
        return self._deadline_s - time.monotonic()

    def live_for(self, seconds: float) -> None:
        """Set the deadline to so many seconds from now, bounded by the longest lifetime."""
        self._deadline_s = min(time.monotonic() + seconds, self._last_s)
        self._changed.set()

    def attach(self, sandbox: Sandbox) -> None:
        """Attach the sandbox that was created for it."""
        self.sandbox = sandbox
        self.folders = Folders(sandbox)
        self.processes = Processes(sandbox, self.workdir, self.created.env, self._lose)
        self.watchers = Watchers(sandbox)
        self._last_s = time.monotonic() + self.limits.lifetime_s
        self.live_for(self.created.timeout_s)
        self.runs = True

    def home(self, user: str | None) -> str:
        """Return the folder at which a user's relative paths begin."""
        return "/root" if user == "root" else self.workdir

    def end(self, *, from_inside: bool = False) -> None:
        """Request its removal."""
        self.runs = False
        self.from_inside |= from_inside
        self._changed.set()

    def _lose(self, from_inside: bool) -> None:
        self.end(from_inside=from_inside)

    async def over(self) -> None:
        """Return when its time is over or its end was requested."""
        while self.runs and self.left_s > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.left_s):
                    await self._changed.wait()
