"""The `e2b` sandbox: micro-VMs of the E2B cloud, or of any server with its protocol.

Commands run under a small supervisor in the sandbox (`_e2b/job.sh`), because the provider's own
streams break, carry text only, and end without their commands. The gateway is reached through
these streams (`_relay.py`), or at a public URL.

Creation is rate-limited, and retried with jitter under one time limit. A create request without an
answer may have succeeded. So before the next attempt, and at the end, sandboxes of that name are
found by their metadata and removed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swerl.core import secrets
from swerl.core.errors import ImageError, SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount, SandboxOrder, new_name
from swerl.sandboxes._e2b import sdk
from swerl.sandboxes._e2b.direct import Tunnel, ask
from swerl.sandboxes._e2b.sandbox import E2BSandbox, SandboxSettings
from swerl.sandboxes._e2b.sdk import CutError, RemoteSandbox

KEY = "E2B_API_KEY"
NAME = "swerl"
"""Metadata key of a sandbox's name."""
_MARK = {"made-by": "swerl"}
_SNAPSHOTS = "/swerl/snapshots"
_VCPU_HOUR = 0.0504
_GIB_HOUR = 0.0162
"""The cloud's published prices in US dollars: 0.000014 a vCPU-second, 0.0000045 a GiB-second."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 16.0
_LAST_WAIT_S = 5.0
"""Seconds to wait for the answer to a create request whose caller was cancelled."""


class Options(BaseModel):
    """Settings of the `e2b` sandbox. The API key comes from E2B_API_KEY."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = "base"
    """Template of the sandboxes if `image_key` is set; `base` is the provider's default."""
    image_key: str = ""
    """Metadata key of the Task's image, for services that choose the image by it. Empty: the Task's
    image is itself a template id, as in the cloud."""
    metadata: dict[str, str] = {}
    """Additional metadata of every sandbox, such as a size or a pool for a service's routing."""
    api_url: str | None = None
    """URL of a self-hosted control plane, or `unix:PATH` of a `swerl sandbox serve` on this
    machine. Default: the cloud's."""
    fingerprint: str = ""
    """SHA-256 of the certificate at `api_url`, which `swerl sandbox serve` prints. With it no other
    certificate is accepted, and no authority needs to have signed it."""
    sandbox_url: str | None = None
    """URL of a self-hosted data plane, if one serves all sandboxes."""
    domain: str | None = None
    """Domain of another cloud: `https://api.<domain>` and `https://49983-<id>.<domain>`."""
    user: str = ""
    """User that agents run as; empty: the template's own."""
    way: Literal["relay", "public"] = "relay"
    """Route to the gateway: `relay` needs no route to this machine; `public` needs one and has
    less delay."""
    public_url: str = ""
    """URL at which sandboxes reach `gateway.bind` and `gateway.port`, for `way = "public"`."""
    boot_timeout_s: float = Field(180.0, gt=0)
    """Seconds until a sandbox must be ready, all attempts together; the first start of a large
    image is slow."""
    create_concurrency: int = Field(16, ge=1)
    """Largest number of sandboxes being created at once."""
    creates_per_s: float = Field(5.0, gt=0)
    """Largest number of creates per second: the cloud allows paying accounts 5, others 1."""
    price_per_hour: float | None = Field(None, ge=0)
    """Price of one sandbox in US dollars per hour. None: the cloud's published prices for the
    limits."""
    request_timeout_s: float = Field(60.0, gt=0)
    """Timeout in seconds of one request without a stream; the SDK's default."""
    output_cap_mib: float = Field(8.0, gt=0)
    """Largest MiB kept of each of a command's two output streams; test logs are below 2."""

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        if (self.way == "public") != bool(self.public_url):
            raise ValueError('public_url and way = "public" must be set together')
        if self.fingerprint and not (self.api_url or "").startswith("https://"):
            raise ValueError("fingerprint needs an api_url that begins with https://")
        return self


def build(options: Options) -> E2BBackend:
    """Return the backend. Raises SandboxUnavailableError if the SDK or the key is missing."""
    sdk.require()
    key = secrets.secret(KEY)
    if not key:
        message = f"{KEY} is not set, and the sandbox is `e2b`"
        hint = f"export {KEY}=…, from the provider's dashboard or `swerl sandbox serve`"
        raise SandboxUnavailableError(message, hint=hint)
    return connect(options, key)


def connect(options: Options, key: str, *, own: bool = False) -> E2BBackend:
    """Return the backend for this key. Raises SandboxUnavailableError if the SDK is missing.

    `own`: the server is the run's own, which accepts limits and mounts, and direct requests.
    """
    sdk.require()
    is_private = options.fingerprint or (options.api_url or "").startswith("unix:")
    access = sdk.E2BAccess(
        way=Tunnel(options.api_url or "", options.fingerprint) if is_private else None,
        api_key=key,
        api_url=options.api_url,
        sandbox_url=options.sandbox_url,
        domain=options.domain,
        request_timeout_s=options.request_timeout_s,
    )
    return E2BBackend(options, access, own=own)


class E2BBackend:
    """Makes sandboxes at an E2B-compatible provider."""

    def __init__(self, options: Options, access: sdk.E2BAccess, *, own: bool) -> None:
        self._options = options
        self._access = access
        self._own = own
        self._asked: asyncio.Future[str] | None = None
        """The question whether the server keeps snapshots by name."""
        self._provider = provider = sdk.E2BProvider(access)
        self._creator = _Creator(
            provider, concurrency=options.create_concurrency, per_s=options.creates_per_s
        )
        self._settings = SandboxSettings(
            user=options.user or None,
            output_cap=int(options.output_cap_mib * 2**20),
            public_url=options.public_url,
        )

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[E2BSandbox]:
        """Create a sandbox of `image`; leaving the context always removes it.

        Its CPU, memory and disk are the template's own: only a run's own server accepts limits.
        """
        order = SandboxOrder(image, limits, workdir, tuple(mounts))
        request = self._request(order, name or new_name())
        timeout_s = self._options.boot_timeout_s
        async with self._access.opened(), self._creator.created(request, timeout_s) as remote:
            sandbox = E2BSandbox(
                self._provider,
                remote,
                settings=self._settings,
                workdir=workdir,
                lifetime_s=limits.lifetime_s,
            )
            try:
                if self._own:
                    await sandbox.go_direct(self._access)
                if await self._keeps_snapshots():
                    await sandbox.keep_with(self._access)
                await sandbox.set_up(mounts)
                yield sandbox
            finally:
                await asyncio.shield(sandbox.close())

    async def live(self) -> Sequence[LiveSandbox]:
        async with self._access.opened():
            all_found = await self._provider.find(_MARK)
        return [
            LiveSandbox(
                name=found.metadata.get(NAME, ""),
                id=found.id,
                image=found.metadata.get(self._options.image_key, found.template),
                started_unix_s=found.started_unix_s,
            )
            for found in all_found
        ]

    async def remove(self, name: str) -> None:
        async with self._access.opened():
            await self._creator.remove({NAME: name})

    def price(self, limits: Limits) -> float:
        if self._options.price_per_hour is not None:
            return self._options.price_per_hour
        return limits.num_cpus * _VCPU_HOUR + limits.memory_mib / 1024 * _GIB_HOUR

    async def identify(self, image: str) -> str:
        """Return a text that changes with the image's content; empty except from swerl's server."""
        wanted = self._request(SandboxOrder(image, Limits(), "/"), "")
        body = {"templateID": wanted.template, "metadata": wanted.metadata}
        return await self._ask("POST", "/swerl/identity", json=body)

    async def find_snapshot(self, name: str) -> str:
        return await self._ask("GET", _SNAPSHOTS, params={"name": name})

    async def drop_snapshot(self, name: str) -> None:
        await self._ask("DELETE", _SNAPSHOTS, params={"name": name})

    async def _ask(self, method: str, path: str, **more: Any) -> str:
        if await self._keeps_snapshots():
            with suppress(SandboxError):
                return await ask(self._access, method, path, **more)
        return ""

    async def _keeps_snapshots(self) -> bool:
        """Return whether the server keeps snapshots by name; it is asked until it answers."""
        if self._options.api_url is None:
            return False  # a cloud
        if (asked := self._asked) is None:
            probe = ask(self._access, "GET", _SNAPSHOTS, params={"name": ""})
            asked = self._asked = asyncio.ensure_future(probe)
        try:
            await asyncio.shield(asked)
        except SandboxError as error:
            if error.retryable and self._asked is asked:
                self._asked = None
            return False
        return True

    def _request(self, order: SandboxOrder, name: str) -> _RemotePlan:
        options, image = self._options, order.image
        routed: Mapping[str, str] = {options.image_key: image} if options.image_key else {}
        ordered = {SandboxOrder.KEY: order.to_text()} if self._own else {}
        host = urlsplit(options.public_url).hostname
        return _RemotePlan(
            template=options.template if options.image_key else image,
            metadata={**options.metadata, **routed, **ordered, **_MARK, NAME: name},
            marks={NAME: name},
            lifetime_s=order.limits.lifetime_s,
            reach=(host,) if host else (),
        )


@dataclass(frozen=True, slots=True)
class _RemotePlan:
    """A sandbox to create."""

    template: str
    metadata: Mapping[str, str]
    marks: Mapping[str, str]
    """The part of the metadata that no other sandbox has."""
    lifetime_s: float
    reach: Sequence[str]
    """Outside hosts that it may reach."""


class _Creator:
    """Creates sandboxes no faster than the provider allows."""

    def __init__(self, provider: sdk.E2BProvider, *, concurrency: int, per_s: float) -> None:
        self._provider = provider
        self._slots = asyncio.Semaphore(concurrency)
        self._interval_s = 1 / per_s
        self._next_at = 0.0

    @asynccontextmanager
    async def created(self, request: _RemotePlan, timeout_s: float) -> AsyncIterator[RemoteSandbox]:
        """Create a sandbox; leaving the context removes sandboxes of requests without an answer.

        The caller ends the sandbox itself. Raises SandboxError after `timeout_s`.
        """
        attempts = _Attempts()
        try:
            yield await self._create(request, timeout_s, attempts)
        finally:
            if attempts.uncertain:
                with suppress(SandboxError):  # `swerl sandbox reap` looks again
                    await asyncio.shield(self.remove(request.marks))

    async def remove(self, marks: Mapping[str, str]) -> None:
        """Kill every sandbox with these marks."""
        for found in await self._provider.find(marks):
            await self._provider.kill(found.id)

    async def _create(
        self, request: _RemotePlan, timeout_s: float, attempts: _Attempts
    ) -> RemoteSandbox:
        try:
            async with asyncio.timeout(timeout_s) as timer:
                while True:
                    try:
                        async with self._slots:
                            await self._pace()
                            return await self._attempt(request, attempts)
                    except SandboxError as error:
                        if not error.retryable:
                            raise
                        attempts.last = error
                    await self._clean_up(request, attempts)
                    await asyncio.sleep(attempts.pause_s())
        except TimeoutError as error:
            if not timer.expired():
                raise
            why = f": {attempts.last}" if attempts.last else ""
            message = f"no sandbox of {request.template!r} within {timeout_s:g} s{why}"
            hint = (attempts.last and attempts.last.hint) or "raise boot_timeout_s"
            raise SandboxError(message, hint=hint, retryable=True) from error

    async def _attempt(self, request: _RemotePlan, attempts: _Attempts) -> RemoteSandbox:
        attempts.count += 1
        attempts.uncertain = True  # until an answer says whether there is a sandbox
        making = asyncio.ensure_future(
            self._provider.create(
                request.template,
                lifetime_s=request.lifetime_s,
                metadata=request.metadata,
                reach=request.reach,
            )
        )
        try:
            remote = await asyncio.shield(making)
        except asyncio.CancelledError:
            attempts.last = await asyncio.shield(_outlast(making)) or attempts.last
            raise
        except CutError:
            raise
        except (SandboxError, ImageError):
            attempts.uncertain = attempts.left_over
            raise
        attempts.uncertain = attempts.left_over
        return remote

    async def _clean_up(self, request: _RemotePlan, attempts: _Attempts) -> None:
        """Remove the sandbox of an attempt without an answer; it may still appear later."""
        if attempts.uncertain:
            attempts.left_over = True
            with suppress(SandboxError):
                await self.remove(request.marks)

    async def _pace(self) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(now, self._next_at)
        self._next_at = begin + self._interval_s
        await asyncio.sleep(begin - now)


@dataclass(slots=True)
class _Attempts:
    """The attempts to create one sandbox."""

    count: int = 0
    uncertain: bool = False
    """Whether a sandbox may exist whose create request got no answer."""
    left_over: bool = False
    """Whether an earlier attempt may have left one."""
    last: SandboxError | None = None

    def pause_s(self) -> float:
        """Return a random pause, up to a bound that doubles with each attempt."""
        bound = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self.count)
        return random.uniform(0, bound)


async def _outlast(making: asyncio.Future[RemoteSandbox]) -> SandboxError | None:
    """Wait for the answer to a cancelled create request, so that its sandbox can be removed.

    Returns the request's error, if any.
    """
    await asyncio.wait({making}, timeout=_LAST_WAIT_S)
    making.cancel()
    (end,) = await asyncio.gather(making, return_exceptions=True)
    return end if isinstance(end, SandboxError) else None
