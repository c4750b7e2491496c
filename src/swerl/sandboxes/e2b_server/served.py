"""The sandboxes that clients created: a task holds each one until its time is over."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import SwerlError
from swerl.core.sandbox import Limits, SandboxOrder
from swerl.sandboxes.e2b_server import access
from swerl.sandboxes.e2b_server.failure import Code, WireError, gone
from swerl.sandboxes.e2b_server.filesystem import Filesystem
from swerl.sandboxes.e2b_server.processes import Processes, wait_ready

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server; clients cannot change them."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default, because the key lets its holder run commands
    here."""
    port: int = 49000
    """Port to listen on; 0 takes a free one."""
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
    """Largest file that can be sent or read, in MiB."""
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
    order: SandboxOrder | None = None
    """The rest of the sandbox, if the server takes orders."""


class ServedSandboxes:
    """All sandboxes of a server."""

    def __init__(self, backend: SandboxBackend, options: ServerOptions) -> None:
        self._backend = backend
        self._options = options
        self._sandboxes: dict[str, ServedSandbox] = {}
        self._closed = False

    def all(self) -> list[ServedSandbox]:
        """Return the running ones, the oldest first."""
        return [served for served in self._sandboxes.values() if served.runs]

    def find(self, sandbox_id: str) -> ServedSandbox | None:
        """Return the running one of this id, or None; a suffix that old SDKs append is ignored."""
        served = self._sandboxes.get(sandbox_id.partition("-")[0])
        return served if served and served.runs else None

    def require(self, sandbox_id: str) -> ServedSandbox:
        """Return the running one of this id. Raises WireError, not found."""
        if served := self.find(sandbox_id):
            return served
        raise WireError(Code.NOT_FOUND, f"Sandbox {sandbox_id[:64]!r} was not found")

    def open_with(self, sandbox_id: str, token: str) -> ServedSandbox:
        """Return the sandbox that this token opens. Raises WireError: gone, or unauthenticated.

        Without an id the token identifies it: some SDKs send no id after they have connected.
        """
        served = self.find(sandbox_id)
        if sandbox_id and served is None:
            raise gone(sandbox_id[:64])
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

    async def create(self, request: SandboxRequest) -> ServedSandbox:
        """Create a sandbox; return once it runs."""
        if self._closed:
            raise WireError(Code.UNAVAILABLE, "the server is stopping")
        if len(self._sandboxes) >= self._options.max_sandboxes:
            message = f"the limit of {len(self._sandboxes)} sandboxes is reached"
            raise WireError(Code.RESOURCE_EXHAUSTED, message)
        order, options = request.order, self._options
        if order:
            served = ServedSandbox(request, order.limits, order.workdir)
        else:
            limits = replace(options.limits, lifetime_s=options.max_lifetime_s)
            served = ServedSandbox(request, limits, options.workdir)
        served.holder = asyncio.create_task(self._hold(served))
        self._sandboxes[served.id] = served
        served.holder.add_done_callback(lambda _: self._sandboxes.pop(served.id))
        try:
            await wait_ready(served.holder, served.ready)
        except asyncio.CancelledError:
            served.end()  # its client is gone and never learned its id
            raise
        return served

    async def remove(self, served: ServedSandbox) -> None:
        """Remove a sandbox; return once it is gone."""
        served.end()
        await asyncio.wait([served.holder])

    async def close(self) -> None:
        """Remove all sandboxes, and create no more."""
        self._closed = True
        sandboxes = list(self._sandboxes.values())
        for served in sandboxes:
            served.end()
            if not served.ready.done():
                served.holder.cancel()
        await asyncio.gather(*(served.holder for served in sandboxes), return_exceptions=True)

    async def _hold(self, served: ServedSandbox) -> None:
        """Hold a sandbox open until its time is over."""
        order = served.created.order
        # The client uploads the mounts that this machine lacks.
        mounts = [mount for mount in order.mounts if mount.source.is_dir()] if order else []
        opened = self._backend.open(
            served.created.image, served.limits, workdir=served.workdir, mounts=mounts
        )
        try:
            async with opened as sandbox:
                served.attach(sandbox)
                served.ready.set_result(None)
                try:
                    await served.over()
                finally:
                    served.end()
                    served.processes.stop()
        except SwerlError as error:
            if not served.ready.done():
                raise
            _LOG.warning("sandbox %s was not removed cleanly: %s", served.id, error)
        finally:
            if served.ready.done():
                await served.processes.close()


class ServedSandbox:
    """One sandbox, with its tokens, deadline, files and commands."""

    def __init__(self, request: SandboxRequest, limits: Limits, workdir: str) -> None:
        self.id = access.new_sandbox_id()
        self.token = access.new_token()
        """Opens everything in it."""
        self.traffic_token = access.new_token()
        """Opens only the servers inside, so their users may have it."""
        self.created = request
        self.limits = limits
        self.workdir = workdir
        self.started_unix_s = time.time()
        self.holder: asyncio.Task[None]
        """Holds it open."""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it runs."""
        self.sandbox: Sandbox
        self.files: Filesystem
        self.processes: Processes
        self.runs = False
        """True while clients can use it."""
        self._deadline_s = 0.0
        self._last_s = math.inf
        self._changed = asyncio.Event()
        self.live_for(request.timeout_s)

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
        self.files = Filesystem(sandbox)
        self.processes = Processes(sandbox, self.workdir, self.created.env, on_lost=self.end)
        self._last_s = time.monotonic() + self.limits.lifetime_s
        self.live_for(self.created.timeout_s)
        self.runs = True

    def home(self, user: str | None) -> str:
        """Return the folder at which a user's relative paths begin."""
        return "/root" if user == "root" else self.workdir

    def end(self) -> None:
        """Request its removal."""
        self.runs = False
        self._changed.set()

    async def over(self) -> None:
        """Return when its time is over or its end was requested."""
        while self.runs and self.left_s > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.left_s):
                    await self._changed.wait()
