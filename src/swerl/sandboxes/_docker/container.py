"""How a container is made: the request for it, and its image where the daemon lacks that."""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from swerl.core.errors import ImageError, SandboxError
from swerl.core.sandbox import Limits, Mount
from swerl.sandboxes._docker import scripts
from swerl.sandboxes._docker.api import Api, ContainerGoneError, NameTakenError

NAME, OWNER, DEADLINE = "swerl.name", "swerl.owner", "swerl.deadline"
_HOSTNAME = "sandbox"
_OVERHEAD_PROCESSES = 8
"""The first process, the keeper, the clock and the frames around commands count too."""
_CLOCK_SLACK_S = 5
_REMOVAL_ROUNDS = 200
_REMOVAL_PAUSE_S = 0.05
_LEAST_MEMORY = 6 << 20
_CONTAINER_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")
_LOCAL_KINDS = ("host", "dir:", "built:")

_MASKED = (
    "/proc/acpi", "/proc/allocinfo", "/proc/asound", "/proc/interrupts", "/proc/kcore",
    "/proc/keys", "/proc/key-users", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags",
    "/proc/latency_stats", "/proc/pagetypeinfo", "/proc/sched_debug", "/proc/scsi",
    "/proc/slabinfo", "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo",
    "/sys/devices/virtual/powercap", "/sys/firmware",
)  # fmt: skip
"""What a container must not see of its machine: more than the daemon's own list, which leaves out
what root may read without a capability."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One container to be."""

    name: str
    image: str
    limits: Limits
    workdir: str
    mounts: Sequence[Mount]
    runtime: str = ""
    user: str = ""
    """The ordinary user; empty for the image's own."""
    may_pull: bool = True
    security: Sequence[str] = ()
    """Security options beside those that every container gets."""
    has_kernel_network: bool = True
    """Whether its network is a namespace of the kernel's, which another process can enter."""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """Resource limits beside those that every container gets."""


@dataclass(slots=True)
class Quota:
    """Whether the daemon's storage driver can limit a container's disk; found out by trying."""

    works: bool


async def create(api: Api, plan: Plan, quota: Quota) -> str:
    """Create the container, not started, and return its id. Raises ImageError, SandboxError."""
    _require_sane(plan)
    try:
        return await _create(api, plan, quota)
    except ImageError as error:
        if not plan.may_pull:
            raise ImageError(
                f"the docker daemon has no image {plan.image}",
                hint="pull it first, or set may_pull = true",
            ) from error
    await pull(api, plan.image)
    return await _create(api, plan, quota)


async def pull(api: Api, image: str) -> None:
    """Have the daemon pull an image. Raises ImageError."""
    repository, at, tag = image.partition("@")
    if not at:
        head, slash, last = image.rpartition("/")
        last, _, tag = last.partition(":")
        repository, tag = head + slash + last, tag or "latest"

    def request(client: Any) -> str:
        lines = client.pull(repository, tag, stream=True, decode=True)
        return next((str(line["error"]) for line in lines if "error" in line), "")

    try:
        said = await api.call(request)
    except SandboxError as error:
        said = str(error).removeprefix("docker: ")
    if said:
        raise ImageError(f"cannot pull {image}: {said[:300]}", hint=_pull_hint(said))


async def remove(api: Api, container: str) -> None:
    """Kill and remove a container and wait until it is gone; nothing where none is."""
    with suppress(ContainerGoneError, NameTakenError):  # it is being removed already
        await api.call(lambda client: client.remove_container(container, v=True, force=True))
        return
    for _ in range(_REMOVAL_ROUNDS):
        try:
            await api.call(lambda client: client.inspect_container(container))
        except ContainerGoneError:
            return
        await asyncio.sleep(_REMOVAL_PAUSE_S)
    raise SandboxError(
        f"the docker daemon does not finish removing {container[:12]}",
        hint="look at it with `docker ps -a`; the daemon's log says why",
    )


def is_local_kind(image: str) -> bool:
    """Say whether only the `local` backend understands this image name."""
    return image.startswith(_LOCAL_KINDS[1:]) or image == _LOCAL_KINDS[0]


def _require_sane(plan: Plan) -> None:
    if not plan.image:
        raise ImageError(
            "there is no image to make a sandbox of", hint="name an image as `docker pull` takes it"
        )
    if is_local_kind(plan.image):
        raise ImageError(
            f"image {plan.image!r} is one of the backend `local`, not a container image",
            hint="name an image that `docker pull` takes, or use `local`",
        )
    for mount in plan.mounts:
        if not mount.source.exists():
            raise SandboxError(
                f"cannot mount {mount.source}: there is no such folder here",
                hint="the folder must exist where the daemon runs",
            )


async def _create(api: Api, plan: Plan, quota: Quota) -> str:
    tries_quota = quota.works
    making = api.begin(lambda client: _request(client, plan, with_quota=tries_quota))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])  # else it would come to be when nobody removes it any more
        raise
    except NameTakenError as error:
        raise SandboxError(
            f"there is a container {plan.name} already",
            hint=f"another name, or `docker rm -f {plan.name}`",
        ) from error
    except SandboxError as error:
        if not (tries_quota and "storage" in str(error)):
            raise
    quota.works = False
    return await _create(api, plan, quota)


def _request(client: Any, plan: Plan, *, with_quota: bool) -> str:
    limits, disk = plan.limits, plan.limits.disk_mib << 20
    host = client.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges", *plan.security],
        mem_limit=max(limits.memory_mib << 20, _LEAST_MEMORY),
        memswap_limit=max(limits.memory_mib << 20, _LEAST_MEMORY),
        pids_limit=limits.num_processes + _OVERHEAD_PROCESSES,
        nano_cpus=int(limits.num_cpus * 1e9),
        shm_size=max(limits.memory_mib << 19, 1 << 20),
        ipc_mode="private",
        auto_remove=True,
        log_config={"Type": "none"},
        ulimits=[_bound(*it) for it in {"core": 0, "fsize": disk, **plan.bounds}.items()],
        storage_opt={"size": f"{limits.disk_mib}M"} if with_quota else None,
        mounts=[_mount(mount) for mount in plan.mounts],
        runtime=plan.runtime or None,
    )
    host["MaskedPaths"] = [*_MASKED]
    clock_s = math.ceil(limits.lifetime_s) + _CLOCK_SLACK_S
    made = client.create_container(
        plan.image,
        entrypoint=["/bin/sh"],
        command=["-c", scripts.FIRST, "swerl", scripts.FIRST, str(clock_s), plan.workdir],
        name=plan.name if _CONTAINER_NAME.fullmatch(plan.name) else None,
        hostname=_HOSTNAME,
        user=plan.user or None,
        working_dir="/",
        stdin_open=True,
        labels=_labels(plan),
        healthcheck={"test": ["NONE"]},
        host_config=host,
        use_config_proxy=False,  # it may hold a password
    )
    return str(made["Id"])


def _bound(name: str, value: int) -> Mapping[str, object]:
    return {"Name": name, "Soft": value, "Hard": value}


def _mount(mount: Mount) -> Mapping[str, object]:
    source = str(mount.source.absolute())
    return {"Type": "bind", "Source": source, "Target": mount.target, "ReadOnly": True}


def _labels(plan: Plan) -> dict[str, str]:
    return {
        NAME: plan.name,
        OWNER: f"{socket.gethostname()}:{os.getpid()}",
        DEADLINE: str(int(time.time() + plan.limits.lifetime_s)),
    }


def _pull_hint(said: str) -> str:
    said = said.lower()
    if "toomanyrequests" in said or "429" in said:
        return "the registry limits pulls: `docker login`, wait, or mirror (`swerl images mirror`)"
    if "unauthorized" in said or "denied" in said or "401" in said:
        return "log in where the daemon runs: `docker login REGISTRY`; is the name right?"
    if "no space left" in said:
        return "the daemon's disk is full: `docker system df`, then `docker system prune`"
    if "manifest" in said or "not found" in said:
        return "is the name right, and its tag or digest?"
    return "can the daemon reach the registry, and may it? `docker pull` says more"
