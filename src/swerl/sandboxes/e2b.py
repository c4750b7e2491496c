"""The `e2b` sandbox: micro-machines of the E2B cloud, or of any server that speaks its protocol.

Commands run under a small supervisor in the sandbox (`_e2b/job.sh`), because the provider's own
streams break, carry text only, and end without their commands. The gateway is reached through
those same streams (`_relay.py`), or at a public URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swerl.core import secrets
from swerl.core.errors import SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount, SandboxOrder, new_name
from swerl.sandboxes._e2b import sdk
from swerl.sandboxes._e2b.create import Creator, Wanted
from swerl.sandboxes._e2b.sandbox import E2BSandbox, Habits

KEY = "E2B_API_KEY"
NAME = "swerl"
"""Metadata key under which a sandbox's name goes."""
_MARK = {"made-by": "swerl"}
_VCPU_HOUR = 0.0504
_GIB_HOUR = 0.0162
"""The cloud's published prices in US dollars: 0.000014 a vCPU-second, 0.0000045 a GiB-second."""


class Options(BaseModel):
    """Settings of the `e2b` sandbox. The API key comes from E2B_API_KEY."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = "base"
    """Template to start from where `image_key` is set; `base` is the provider's own default."""
    image_key: str = ""
    """Metadata key under which the Task's image goes, for gateways that choose the image by it.
    Empty where the Task's image is itself a template id, as in the cloud."""
    metadata: dict[str, str] = {}
    """More metadata for every sandbox, such as a size or a pool that a gateway routes on."""
    api_url: str | None = None
    """URL of a self-hosted control plane; the cloud's by default."""
    sandbox_url: str | None = None
    """URL of a self-hosted data plane, where one serves all sandboxes."""
    domain: str | None = None
    """Domain of another cloud: `https://api.<domain>` and `https://49983-<id>.<domain>`."""
    user: str = ""
    """User that agents run as; empty for the template's own."""
    way: Literal["relay", "public"] = "relay"
    """How the gateway is reached: `relay` needs no route to this machine; `public` has less delay
    and needs one."""
    public_url: str = ""
    """URL at which sandboxes reach `gateway.bind` and `gateway.port`, for `way = "public"`."""
    boot_timeout_s: float = Field(180.0, gt=0)
    """Most seconds until a sandbox stands, all attempts together; large images are slow once."""
    create_concurrency: int = Field(16, ge=1)
    """Sandboxes being created at once."""
    creates_per_s: float = Field(5.0, gt=0)
    """Most creates begun a second: the cloud allows 5 to paying accounts, 1 to others."""
    price_per_hour: float | None = Field(None, ge=0)
    """US dollars of one sandbox-hour; none takes the cloud's published prices and the limits."""
    request_timeout_s: float = Field(60.0, gt=0)
    """Most seconds of one request that carries no stream; the SDK's own default."""
    output_cap_mib: float = Field(8.0, gt=0)
    """Most MiB kept of each of a command's two output streams; test logs are below 2."""

    @model_validator(mode="after")
    def _check_way(self) -> Self:
        if (self.way == "public") != bool(self.public_url):
            raise ValueError(
                'public_url belongs to way = "public", and neither goes without the other'
            )
        return self


def build(options: Options) -> E2BBackend:
    """Return the backend. Raises SandboxUnavailableError without the SDK or the key."""
    sdk.require()
    key = secrets.secret(KEY)
    if not key:
        message = f"{KEY} is not set, and the sandbox is `e2b`"
        hint = f"export {KEY}=…, from the provider's dashboard or `swerl sandbox serve`"
        raise SandboxUnavailableError(message, hint=hint)
    return connect(options, key)


def connect(options: Options, key: str, *, own: bool = False) -> E2BBackend:
    """Return the backend for this key. Raises SandboxUnavailableError without the SDK.

    `own` says that the server is the run's own, which takes orders of whole sandboxes.
    """
    sdk.require()
    access = sdk.Access(
        api_key=key,
        api_url=options.api_url,
        sandbox_url=options.sandbox_url,
        domain=options.domain,
        request_timeout_s=options.request_timeout_s,
    )
    return E2BBackend(options, sdk.Provider(access), own=access if own else None)


class E2BBackend:
    """Makes sandboxes at an E2B-compatible provider."""

    def __init__(
        self, options: Options, provider: sdk.Provider, *, own: sdk.Access | None = None
    ) -> None:
        """`own` is how to reach a server of the run's own, which does more than E2B's do."""
        self._options = options
        self._own = own
        self._provider = provider
        self._creator = Creator(
            provider, concurrency=options.create_concurrency, per_s=options.creates_per_s
        )
        self._habits = Habits(
            user=options.user or None,
            output_cap=int(options.output_cap_mib * 2**20),
            public_url=options.public_url,
        )

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[E2BSandbox]:
        """Create a sandbox of `image`; leaving the context removes it whatever happened.

        Its CPU, memory and disk are the template's own: no provider but a run's own server takes
        other limits.
        """
        wanted = self._wanted(image, limits, name or new_name())
        if self._own:
            order = SandboxOrder(image, limits, workdir, tuple(mounts)).to_text()
            wanted = replace(wanted, metadata={**wanted.metadata, SandboxOrder.KEY: order})
        return self._open(wanted, workdir, mounts)

    async def live(self) -> Sequence[LiveSandbox]:
        """Return swerl's sandboxes of this account, whoever opened them."""
        return [
            LiveSandbox(
                name=found.metadata.get(NAME, ""),
                id=found.id,
                image=found.metadata.get(self._options.image_key, found.template),
                started_unix_s=found.started_unix_s,
            )
            for found in await self._provider.find(_MARK)
        ]

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name; nothing where none is."""
        await self._creator.remove({NAME: name})

    def price(self, limits: Limits) -> float:
        """Return what such a sandbox costs, in US dollars an hour."""
        if self._options.price_per_hour is not None:
            return self._options.price_per_hour
        return limits.num_cpus * _VCPU_HOUR + limits.memory_mib / 1024 * _GIB_HOUR

    @asynccontextmanager
    async def _open(
        self, wanted: Wanted, workdir: str, mounts: Sequence[Mount]
    ) -> AsyncIterator[E2BSandbox]:
        options = self._options
        async with self._creator.created(wanted, options.boot_timeout_s) as machine:
            sandbox = E2BSandbox(
                self._provider,
                machine,
                habits=self._habits,
                workdir=workdir,
                lifetime_s=wanted.lifetime_s,
            )
            try:
                if self._own:
                    await sandbox.go_direct(self._own)
                await sandbox.set_up(mounts)
                yield sandbox
            finally:
                await asyncio.shield(sandbox.close())

    def _wanted(self, image: str, limits: Limits, name: str) -> Wanted:
        options = self._options
        routed: Mapping[str, str] = {options.image_key: image} if options.image_key else {}
        host = urlsplit(options.public_url).hostname
        return Wanted(
            template=options.template if options.image_key else image,
            metadata={**options.metadata, **routed, **_MARK, NAME: name},
            marks={NAME: name},
            lifetime_s=limits.lifetime_s,
            reach=(host,) if host else (),
        )
