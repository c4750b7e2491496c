"""The sandboxes that clients have made: each lives in a task of its own until its time is over."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import SwerlError
from swerl.core.sandbox import Limits, Mount, SandboxOrder
from swerl.sandboxes.e2b_server import access
from swerl.sandboxes.e2b_server.failure import Code, Failure, gone, why
from swerl.sandboxes.e2b_server.folders import Folders
from swerl.sandboxes.e2b_server.options import ServerOptions
from swerl.sandboxes.e2b_server.processes import Processes
from swerl.sandboxes.e2b_server.waiting import wait_ready
from swerl.sandboxes.e2b_server.watchers import Watchers

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for when it creates a sandbox."""

    template: str
    image: str
    timeout_s: float
    metadata: Mapping[str, str]
    env: Mapping[str, str]
    idempotency_key: str = ""
    order: SandboxOrder | None = None
    """What it asks for besides, where the server takes orders."""


class Box:
    """One sandbox and all that clients know of it."""

    def __init__(self, wish: Wish, limits: Limits, workdir: str) -> None:
        self.id = access.new_sandbox_id()
        self.token = access.new_token()
        """Opens all of it."""
        self.traffic_token = access.new_token()
        """Opens the servers inside, and so may be given to their users."""
        self.wish = wish
        self.limits = limits
        self.workdir = workdir
        self.started_unix_s = time.time()
        self.sandbox: Sandbox
        self.folders: Folders
        self.processes: Processes
        self.watchers: Watchers
        self.runs = False
        """Whether clients can use it."""
        self.from_inside = False
        """Whether what ran in it has ended it."""
        self._deadline_s = 0.0
        self._last_s = math.inf
        self._changed = asyncio.Event()
        self.live_for(wish.timeout_s)

    @property
    def end_unix_s(self) -> float:
        """When its time is over, in seconds since 1970."""
        return time.time() + self.left_s

    @property
    def left_s(self) -> float:
        """Seconds until its time is over."""
        return self._deadline_s - time.monotonic()

    def live_for(self, seconds: float) -> None:
        """Let its time be over so many seconds from now, and at the longest life's end at last."""
        self._deadline_s = min(time.monotonic() + seconds, self._last_s)
        self._changed.set()

    def stand(self, sandbox: Sandbox) -> None:
        """Take the sandbox over that was made for it."""
        self.sandbox = sandbox
        self.folders = Folders(sandbox)
        self.processes = Processes(sandbox, self.workdir, self.wish.env, self._lose)
        self.watchers = Watchers(sandbox)
        self._last_s = time.monotonic() + self.limits.lifetime_s
        self.live_for(self.wish.timeout_s)
        self.runs = True

    def home(self, user: str | None) -> str:
        """Return where a user's relative paths begin."""
        return "/root" if user == "root" else self.workdir

    def end(self, *, from_inside: bool = False) -> None:
        """Have it removed."""
        self.runs = False
        self.from_inside |= from_inside
        self._changed.set()

    def _lose(self, from_inside: bool) -> None:
        self.end(from_inside=from_inside)

    async def over(self) -> None:
        """Return when its time is over or its end was asked for."""
        while self.runs and self.left_s > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.left_s):
                    await self._changed.wait()


@dataclass(frozen=True, slots=True)
class _Keeper:
    """The task that holds a sandbox open."""

    box: Box
    task: asyncio.Task[None]
    ready: asyncio.Future[None]
    """Done once the sandbox stands."""


class Boxes:
    """All sandboxes of a server."""

    def __init__(self, backend: SandboxBackend, options: ServerOptions) -> None:
        self._backend = backend
        self._options = options
        self._keepers: dict[str, _Keeper] = {}
        self._undone: set[str] = set()
        """Ids of those that what ran in them has ended."""
        self._closed = False

    def all(self) -> list[Box]:
        """Return those that run, the oldest first."""
        return [keeper.box for keeper in self._keepers.values() if keeper.box.runs]

    def find(self, sandbox_id: str) -> Box | None:
        """Return the one of this id; what old SDKs append after a dash is not looked at."""
        keeper = self._keepers.get(sandbox_id.partition("-")[0])
        return keeper.box if keeper and keeper.box.runs else None

    def require(self, sandbox_id: str) -> Box:
        """Return the one of this id. Raises Failure, not found."""
        if box := self.find(sandbox_id):
            return box
        told = why(sandbox_id in self._undone)
        raise Failure(Code.NOT_FOUND, f"Sandbox {sandbox_id[:64]!r} was not found{told}")

    def open_with(self, sandbox_id: str, token: str) -> Box:
        """Return the one that this token opens. Raises Failure: gone, or unauthenticated.

        Without an id the token alone says which: some SDKs send none once they have connected.
        """
        box = self.find(sandbox_id)
        if sandbox_id and box is None:
            raise gone(sandbox_id[:64], from_inside=sandbox_id in self._undone)
        for candidate in [box] if box else self.all():
            if access.same(token, candidate.token):
                return candidate
        message = "the sandbox's access token is missing or wrong"
        raise Failure(Code.UNAUTHENTICATED, message)

    def open_port_with(self, sandbox_id: str, traffic_token: str, token: str) -> Box:
        """Return the one whose servers one of these opens. Raises Failure as `open_with` does."""
        box = self.find(sandbox_id)
        if box and access.same(traffic_token, box.traffic_token):
            return box
        return self.open_with(sandbox_id, token)

    async def create(self, wish: Wish) -> Box:
        """Make a sandbox, or return the one that the same wish made, or makes, already."""
        if keeper := self._made_by(wish):
            await asyncio.wait([keeper.task, keeper.ready], return_when=asyncio.FIRST_COMPLETED)
            if keeper.box.runs:
                return keeper.box
        if self._closed:
            raise Failure(Code.UNAVAILABLE, "the server stops")
        if len(self._keepers) >= self._options.max_sandboxes:
            message = f"{len(self._keepers)} sandboxes run, and no more may"
            raise Failure(Code.RESOURCE_EXHAUSTED, message)
        order, options = wish.order, self._options
        if order:
            box = Box(wish, order.limits, order.workdir)
        else:
            limits = replace(options.limits, lifetime_s=options.max_lifetime_s)
            box = Box(wish, limits, options.workdir)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._keep(box, ready))
        self._keepers[box.id] = _Keeper(box, task, ready)
        task.add_done_callback(lambda _: self._keepers.pop(box.id))
        try:
            await wait_ready(task, ready)
        except asyncio.CancelledError:
            box.end()  # its client is gone and will never know its id
            raise
        return box

    async def remove(self, box: Box) -> None:
        """Remove a sandbox; returns when it is gone."""
        box.end()
        if keeper := self._keepers.get(box.id):
            await asyncio.wait([keeper.task])

    async def close(self) -> None:
        """Remove all sandboxes, and make no more."""
        self._closed = True
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.box.end()
            if not keeper.ready.done():
                keeper.task.cancel()
        await asyncio.gather(*(keeper.task for keeper in keepers), return_exceptions=True)

    def _made_by(self, wish: Wish) -> _Keeper | None:
        if not wish.idempotency_key:
            return None
        for keeper in self._keepers.values():
            made, is_alive = keeper.box.wish, keeper.box.runs or not keeper.ready.done()
            if is_alive and made.idempotency_key == wish.idempotency_key:
                if made != wish:
                    message = "this idempotency key came with another request before"
                    raise Failure(Code.FAILED_PRECONDITION, message, status=409)
                return keeper
        return None

    async def _keep(self, box: Box, ready: asyncio.Future[None]) -> None:
        """Hold a sandbox open until its time is over."""
        mounts = _there(box.wish.order.mounts) if box.wish.order else ()
        opened = self._backend.open(box.wish.image, box.limits, workdir=box.workdir, mounts=mounts)
        try:
            async with opened as sandbox:
                box.stand(sandbox)
                _LOG.info("sandbox %s of %s runs", box.id, box.wish.image)
                ready.set_result(None)
                await self._until_over(box)
        except SwerlError as error:
            if not ready.done():
                raise
            _LOG.warning("sandbox %s was not removed cleanly: %s", box.id, error)
        finally:
            if ready.done():
                await box.processes.close()
                _LOG.info("sandbox %s is gone", box.id)

    async def _until_over(self, box: Box) -> None:
        try:
            await box.over()
        finally:
            box.end()
            if box.from_inside:
                self._undone.add(box.id)
            box.processes.stop(from_inside=box.from_inside)
            await box.watchers.close()


def _there(mounts: Sequence[Mount]) -> list[Mount]:
    """Return those that this machine has; their client sends the others."""
    return [mount for mount in mounts if mount.source.is_dir()]
