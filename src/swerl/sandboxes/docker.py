"""The `docker` sandbox: a container of a Docker daemon, or of Podman's socket, without a network.

The daemon makes and removes the container. Its first process holds the controller's connection,
so that it ends with the controller; the daemon then removes what is left.
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
from swerl.sandboxes._docker import container, seccomp
from swerl.sandboxes._docker.api import LIMITS_HELD, Api
from swerl.sandboxes._docker.container import Plan, Quota
from swerl.sandboxes._docker.disk import DiskWatch
from swerl.sandboxes._docker.machine import Machine
from swerl.sandboxes._docker.sandbox import DockerSandbox

_NAMESPACE_RUNTIMES = ("runc", "crun", "youki")
"""OCI runtimes whose containers are namespaces; others, such as gVisor, have their own network."""
_PODMAN_BOUNDS = {"nofile": 4096, "nproc": 4096}
"""Its own defaults take CAP_SYS_RESOURCE, which a machine that is virtual itself may lack."""


class Options(BaseModel):
    """Settings of the `docker` sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = ""
    """The daemon, `unix:///…` or `tcp://host:port`. Empty for what the `docker` command uses:
    DOCKER_HOST where that is set, else the default socket."""
    runtime: str = ""
    """OCI runtime, such as `runsc`; empty for the daemon's own default."""
    user: str = ""
    """Ordinary user of the containers, by name or number; empty for the image's own, since images
    are built for theirs."""
    may_pull: bool = True
    """Whether the daemon may pull an image that it lacks."""
    output_cap_mib: float = Field(default=8.0, gt=0)
    """Most MiB kept of each of a command's two output streams; test logs are below 2."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """US dollars that one sandbox costs an hour, where the daemon's machine is paid for."""


def build(options: Options) -> DockerBackend:
    """Return the backend; the daemon is asked first when a sandbox is opened."""
    return DockerBackend(options)


class DockerBackend:
    """Makes containers with one daemon."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._api = Api(options.base_url)
        self._quota: Quota | None = None
        self._watch = DiskWatch(self._api)

    @asynccontextmanager
    async def _open(self, plan: Plan) -> AsyncIterator[DockerSandbox]:
        await self._api.connect()
        quota = self._quota = self._quota or _expect_quota(self._api.info)
        plan = _suit(plan, self._api)
        try:
            machine = Machine(self._api, plan, await container.create(self._api, plan, quota))
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await asyncio.shield(self.remove(plan.name))
            raise
        held = {name for name, key in LIMITS_HELD.items() if self._api.info.get(key)}
        limits = frozenset(held | ({"disk"} if quota.works else set()))
        sandbox = DockerSandbox(machine, limits, int(self._options.output_cap_mib * 2**20))
        if not quota.works:
            self._watch.add(machine)
        try:
            await sandbox.boot()
            yield sandbox
        finally:
            self._watch.drop(machine)
            failed = sys.exception() is not None
            try:
                await asyncio.shield(sandbox.close())
            except SandboxUnavailableError:  # it says less than the error that ends the block
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
        """Create a sandbox of `image`; leaving the context removes it whatever happened."""
        options = self._options
        plan = Plan(
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
        """Return the sandboxes of swerl's that the daemon has, whoever opened them."""
        found = await self._list(container.NAME)
        return [
            LiveSandbox(
                name=entry["Labels"][container.NAME],
                id=entry["Id"],
                image=entry["Image"],
                started_unix_s=float(entry["Created"]),
            )
            for entry in found
        ]

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name and all that is left of it; nothing where none is."""
        for entry in await self._list(f"{container.NAME}={name}"):
            await container.remove(self._api, entry["Id"])

    def price(self, limits: Limits) -> float:
        """Return what such a sandbox costs, in US dollars an hour: as the settings say."""
        return self._options.price_per_hour

    async def _list(self, label: str) -> list[dict[str, Any]]:
        await self._api.connect()
        return await self._api.call(
            lambda client: client.containers(all=True, filters={"label": label})
        )


def _suit(plan: Plan, api: Api) -> Plan:
    """Add to the plan what this daemon needs."""
    runtime = plan.runtime or api.info.get("DefaultRuntime") or "runc"
    known = any(name in runtime for name in _NAMESPACE_RUNTIMES)
    plan = replace(plan, has_kernel_network=known)
    if not api.is_podman:  # which would take a filter for the name of a file
        return replace(plan, security=seccomp.options(api.info.get("SecurityOptions") or ()))
    return replace(plan, bounds=_PODMAN_BOUNDS)


def _expect_quota(info: dict[str, Any]) -> Quota:
    """Say whether the storage driver may limit a container's disk; creating one settles it."""
    backing = dict(map(tuple, info.get("DriverStatus") or ())).get("Backing Filesystem", "")
    driver = info.get("Driver", "")
    return Quota(driver in ("btrfs", "zfs") or (driver == "overlay2" and backing == "xfs"))
