"""The `docker` sandbox: a container of a Docker daemon, without a network.

The daemon makes and removes the container. The container's init process reads from the controller's
connection, so it ends with the controller; the daemon then removes the rest.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount, new_name
from swerl.sandboxes._docker import create
from swerl.sandboxes._docker.api import Api, limits_held
from swerl.sandboxes._docker.container import Container, DiskWatch
from swerl.sandboxes._docker.create import ContainerPlan, DiskQuota
from swerl.sandboxes._docker.sandbox import DockerSandbox

_NAMESPACE_RUNTIMES = ("runc", "crun", "youki")
"""OCI runtimes whose containers are namespaces; others, such as gVisor, have their own network."""


class Options(BaseModel):
    """Settings of the `docker` sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = ""
    """The daemon, `unix:///…` or `tcp://host:port`. Empty: DOCKER_HOST if it is set, or the default
    socket, as the `docker` command does."""
    runtime: str = ""
    """OCI runtime, such as `runsc`; empty: the daemon's default."""
    user: str = ""
    """Ordinary user of the containers, by name or number. Empty: the image's own user, for which
    the image was built."""
    may_pull: bool = True
    """Whether the daemon may pull an image that it lacks."""
    output_cap_mib: float = Field(default=8.0, gt=0)
    """Largest MiB kept of each of a command's two output streams; test logs are below 2."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of one sandbox in US dollars per hour, if the daemon's machine is paid for by use."""


def build(options: Options) -> DockerBackend:
    """Return the backend. It connects to the daemon when the first sandbox is opened."""
    return DockerBackend(options)


class DockerBackend:
    """Makes containers with one daemon."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._api = Api(options.base_url)
        self._quota: DiskQuota | None = None
        self._watch = DiskWatch(self._api)

    @asynccontextmanager
    async def _open(self, plan: ContainerPlan) -> AsyncIterator[DockerSandbox]:
        await self._api.connect()
        quota = self._quota = self._quota or _expect_quota(self._api.info)
        plan = _adapt(plan, self._api)
        try:
            container = Container(self._api, plan, await create.create(self._api, plan, quota))
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.shield(self.remove(plan.name))
            raise
        limits = frozenset(limits_held(self._api.info) | ({"disk"} if quota.works else set()))
        sandbox = DockerSandbox(container, limits, int(self._options.output_cap_mib * 2**20))
        if not quota.works:
            self._watch.add(container)
        try:
            await sandbox.boot()
            yield sandbox
        finally:
            self._watch.drop(container)
            failed = sys.exception() is not None
            try:
                await asyncio.shield(sandbox.close())
            except SandboxUnavailableError:  # the error that ends the block explains more
                if not failed:
                    raise

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[DockerSandbox]:
        options = self._options
        plan = ContainerPlan(
            name=name or new_name(),
            image=image,
            limits=limits,
            workdir=workdir,
            mounts=tuple(mounts),
            runtime=options.runtime,
            user=options.user,
            may_pull=options.may_pull,
        )
        return self._open(plan)

    async def live(self) -> Sequence[LiveSandbox]:
        found = await self._list(create.NAME)
        return [
            LiveSandbox(
                name=entry["Labels"][create.NAME],
                id=entry["Id"],
                image=entry["Image"],
                started_unix_s=float(entry["Created"]),
            )
            for entry in found
        ]

    async def remove(self, name: str) -> None:
        for entry in await self._list(f"{create.NAME}={name}"):
            await create.remove(self._api, entry["Id"])

    def price(self, limits: Limits) -> float:
        return self._options.price_per_hour

    async def identify(self, image: str) -> str:
        await self._api.connect()
        return await create.image_id(self._api, image)

    async def find_snapshot(self, name: str) -> str:
        await self._api.connect()
        image = create.snapshot_image(name)
        return image if await create.image_id(self._api, image) else ""

    async def drop_snapshot(self, name: str) -> None:
        await self._api.connect()
        await create.remove_image(self._api, create.snapshot_image(name))

    async def prune_snapshots(self, *, dry_run: bool = False) -> int:
        """Remove the unused snapshots that are older than 30 days; return their number.

        A dry run counts the used ones, too.
        """
        await self._api.connect()
        return await create.prune_snapshots(self._api, dry_run=dry_run)

    async def _list(self, label: str) -> list[dict[str, Any]]:
        await self._api.connect()
        return await self._api.call(
            lambda client: client.containers(all=True, filters={"label": label})
        )


def _adapt(plan: ContainerPlan, api: Api) -> ContainerPlan:
    """Return the plan with the settings that this daemon needs."""
    runtime = plan.runtime or api.info.get("DefaultRuntime") or "runc"
    known = any(name in runtime for name in _NAMESPACE_RUNTIMES)
    security = create.security_options(api.info.get("SecurityOptions") or ())
    return replace(plan, has_kernel_network=known, security=security)


def _expect_quota(info: dict[str, Any]) -> DiskQuota:
    """Guess whether the storage driver can limit a container's disk; the first create shows it."""
    backing = dict(map(tuple, info.get("DriverStatus") or ())).get("Backing Filesystem", "")
    driver = info.get("Driver", "")
    return DiskQuota(driver in ("btrfs", "zfs") or (driver == "overlay2" and backing == "xfs"))
