"""The `e2b` sandbox: micro-VMs of the E2B cloud, or of any server with its protocol.

The gateway is reached through the stream of a command (`_relay.py`).

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

from pydantic import BaseModel, ConfigDict, Field

from swerl.core import secrets
from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount, SandboxOrder, new_name
from swerl.sandboxes import _e2b_sdk as sdk
from swerl.sandboxes._e2b_sandbox import E2BSandbox

KEY = "E2B_API_KEY"
NAME = "swerl"
"""Metadata key of a sandbox's name."""
_MARK = {"made-by": "swerl"}
_VCPU_HOUR = 0.0504
_GIB_HOUR = 0.0162
"""The cloud's published prices in US dollars: 0.000014 a vCPU-second, 0.0000045 a GiB-second."""
_REQUEST_S, _OWN_REQUEST_S = 60.0, 300.0
"""Timeout of one request in seconds; a run's own machine may have to pull the image first."""
_BOOT_S, _OWN_BOOT_S = 180.0, 600.0
"""Seconds until a sandbox must be ready, all attempts together."""
_CREATES, _OWN_CREATES = 16, 256
"""Largest number of sandboxes being created at once."""
_DEFAULT_TEMPLATE = "base"
"""Template of the sandboxes if `image_key` is set: the provider's default."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 16.0
_LAST_WAIT_S = 5.0
"""Seconds to wait for the answer to a create request whose caller was cancelled."""


class Options(BaseModel):
    """Settings of the `e2b` sandbox. The API key comes from E2B_API_KEY."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image_key: str = ""
    """Metadata key of the Task's image, for services that choose the image by it. Empty: the Task's
    image is itself a template id, as in the cloud."""
    metadata: dict[str, str] = {}
    """Additional metadata of every sandbox, such as a size or a pool for a service's routing."""
    api_url: str | None = None
    """URL of a self-hosted control plane. Default: the cloud's."""
    sandbox_url: str | None = None
    """URL of a self-hosted data plane, if one serves all sandboxes."""
    creates_per_s: float = Field(5.0, gt=0)
    """Largest number of creates per second: the cloud allows paying accounts 5, others 1."""
    price_per_hour: float | None = Field(None, ge=0)
    """Price of one sandbox in US dollars per hour. None: the cloud's published prices for the
    limits."""


def build(options: Options) -> E2BBackend:
    """Return the backend. Raises SandboxUnavailableError if the SDK or the key is missing."""
    sdk.require()
    key = secrets.secret(KEY)
    if not key:
        message = f"{KEY} is not set, and the sandbox is `e2b`"
        hint = f"export {KEY}=…, from the provider's dashboard or `swerl sandbox serve`"
        raise SandboxUnavailableError(message, hint=hint)
    return connect(options, key)


def connect(options: Options, key: str, *, is_own: bool = False) -> E2BBackend:
    """Return the backend for this key. Raises SandboxUnavailableError if the SDK is missing.

    `is_own`: the server is the run's own, which accepts limits and mounts.
    """
    sdk.require()
    return E2BBackend(options, key, is_own=is_own)


class E2BBackend:
    """Makes sandboxes at an E2B-compatible provider."""

    def __init__(self, options: Options, key: str, *, is_own: bool) -> None:
        self._options = options
        self._is_own = is_own
        addresses = {"api_url": options.api_url, "sandbox_url": options.sandbox_url}
        self._provider = sdk.E2BProvider(
            key,
            _OWN_REQUEST_S if is_own else _REQUEST_S,
            {name: address for name, address in addresses.items() if address},
        )
        self._slots = asyncio.Semaphore(_OWN_CREATES if is_own else _CREATES)
        self._next_at = 0.0
        """When the next create may be sent, by the event loop's clock."""

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
        async with self._created(self._request(order, name or new_name())) as remote:
            sandbox = E2BSandbox(
                self._provider,
                remote,
                workdir=workdir,
                lifetime_s=limits.lifetime_s,
            )
            try:
                await sandbox.set_up(mounts)
                yield sandbox
            finally:
                await asyncio.shield(sandbox.close())

    async def live(self) -> Sequence[LiveSandbox]:
        return [
            LiveSandbox(
                name=listed.metadata.get(NAME, ""),
                id=listed.id,
                image=listed.metadata.get(self._options.image_key, listed.template),
                started_unix_s=listed.started_unix_s,
            )
            for listed in await self._provider.find(_MARK)
        ]

    async def remove(self, name: str) -> None:
        for listed in await self._provider.find({NAME: name}):
            await self._provider.kill(listed.id)

    def price(self, limits: Limits) -> float:
        if self._options.price_per_hour is not None:
            return self._options.price_per_hour
        return limits.num_cpus * _VCPU_HOUR + limits.memory_mib / 1024 * _GIB_HOUR

    def _request(self, order: SandboxOrder, name: str) -> _CreateRequest:
        options, image = self._options, order.image
        routed: Mapping[str, str] = {options.image_key: image} if options.image_key else {}
        ordered = {SandboxOrder.KEY: order.to_text()} if self._is_own else {}
        return _CreateRequest(
            name=name,
            template=_DEFAULT_TEMPLATE if options.image_key else image,
            metadata={**options.metadata, **routed, **ordered, **_MARK, NAME: name},
            lifetime_s=order.limits.lifetime_s,
        )

    @asynccontextmanager
    async def _created(self, request: _CreateRequest) -> AsyncIterator[sdk.RemoteSandbox]:
        """Create a sandbox; leaving the context removes sandboxes of requests without an answer.

        The caller ends the sandbox itself. Raises SandboxError after a time limit.
        """
        try:
            yield await self._create(request)
        finally:
            if request.is_uncertain:
                with suppress(SandboxError):  # `swerl sandbox reap` looks again
                    await asyncio.shield(self.remove(request.name))

    async def _create(self, request: _CreateRequest) -> sdk.RemoteSandbox:
        timeout_s, pause_s = (_OWN_BOOT_S if self._is_own else _BOOT_S), _FIRST_PAUSE_S
        last: SandboxError | None = None
        try:
            async with asyncio.timeout(timeout_s) as timer:
                while True:
                    try:
                        async with self._slots:
                            await self._pace()
                            return await self._attempt(request)
                    except SandboxError as error:
                        if not error.retryable:
                            raise
                        last = error
                    if request.is_uncertain:  # its sandbox may still appear later
                        with suppress(SandboxError):
                            await self.remove(request.name)
                    pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                    await asyncio.sleep(random.uniform(0, pause_s))
        except TimeoutError as error:
            if not timer.expired():
                raise
            why = f": {last}" if last else ""
            message = f"no sandbox of {request.template!r} within {timeout_s:g} s{why}"
            hint = (last and last.hint) or "the provider may be short of machines"
            raise SandboxError(message, hint=hint, retryable=True) from error

    async def _attempt(self, request: _CreateRequest) -> sdk.RemoteSandbox:
        creating = asyncio.ensure_future(
            self._provider.create(
                request.template,
                lifetime_s=request.lifetime_s,
                metadata=request.metadata,
            )
        )
        try:
            return await asyncio.shield(creating)
        except sdk.CutError:
            request.is_uncertain = True
            raise
        except asyncio.CancelledError:
            # Its answer must come first: the sandbox cannot be removed before it exists.
            request.is_uncertain = True
            await asyncio.shield(asyncio.wait({creating}, timeout=_LAST_WAIT_S))
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            raise

    async def _pace(self) -> None:
        """Wait until the provider's rate allows another create."""
        now = asyncio.get_running_loop().time()
        begin = max(now, self._next_at)
        self._next_at = begin + 1 / self._options.creates_per_s
        await asyncio.sleep(begin - now)


@dataclass(slots=True)
class _CreateRequest:
    """A sandbox to create."""

    name: str
    template: str
    metadata: Mapping[str, str]
    lifetime_s: float
    is_uncertain: bool = False
    """Whether a create request got no answer, so that a sandbox may exist that nobody uses."""
