"""Create and remove containers, and pull images that the daemon lacks.

Some daemons' own system call filter permits sockets to the host's hypervisor (vsock); Docker's
refuses them from version 23 on. For the older ones, which call it `default`, the filter here
replaces it. It refuses the same calls, and also vsock and io_uring, which no filter can inspect. A
filter that the daemon's owner has set is kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from swerl.core.chat import Json
from swerl.core.errors import ImageError, SandboxError
from swerl.core.sandbox import Limits, Mount
from swerl.sandboxes import _machine_scripts as scripts
from swerl.sandboxes._docker_daemon import ContainerGoneError, Daemon, NameTakenError, hint_for
from swerl.sandboxes._machine import labels

_HOSTNAME = "sandbox"
_OVERHEAD_PROCESSES = 8
"""Init process, signaller, timer and the shells around commands: they count as processes too."""
_CLOCK_SLACK_S = 5
_REMOVAL_ROUNDS = 200
_REMOVAL_PAUSE_S = 0.05
_MIN_MEMORY_BYTES = 6 << 20
_CONTAINER_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")

_MASKED = (
    "/proc/acpi", "/proc/allocinfo", "/proc/asound", "/proc/interrupts", "/proc/kcore",
    "/proc/keys", "/proc/key-users", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags",
    "/proc/latency_stats", "/proc/pagetypeinfo", "/proc/sched_debug", "/proc/scsi",
    "/proc/slabinfo", "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo",
    "/sys/devices/virtual/powercap", "/sys/firmware",
)  # fmt: skip
"""Files of the machine that a container must not see. The daemon's own list lacks files that root
may read without a capability."""
_ENOSYS = 38
_REFUSED = (
    "acct", "add_key", "adjtimex", "bpf", "chroot", "clock_adjtime", "clock_settime",
    "create_module", "delete_module", "fanotify_init", "finit_module", "fsconfig", "fsmount",
    "fsopen", "fspick", "get_kernel_syms", "get_mempolicy", "init_module", "ioperm", "iopl",
    "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "mbind", "mount",
    "mount_setattr", "move_mount", "move_pages", "name_to_handle_at", "nfsservctl",
    "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root", "query_module", "quotactl",
    "quotactl_fd", "reboot", "request_key", "set_mempolicy", "setdomainname", "sethostname",
    "setns", "settimeofday", "swapoff", "swapon", "sysfs", "syslog", "umount2", "unshare",
    "uselib", "userfaultfd", "ustat", "vhangup",
)  # fmt: skip
_ABSENT = ("clone3", "io_uring_enter", "io_uring_register", "io_uring_setup")
"""Calls that fail with ENOSYS: programs then use others."""
_NAMESPACES = tuple(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
_LAST_FAMILY = 16
_FAMILIES = (1, 2, 10, _LAST_FAMILY)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """A container to create."""

    name: str
    image: str
    limits: Limits
    workdir: str
    mounts: Sequence[Mount]
    runtime: str
    user: str
    """The ordinary user; empty: the image's own."""
    has_kernel_network: bool
    """Whether its network is a kernel namespace that another process can enter."""


async def create(daemon: Daemon, plan: ContainerPlan) -> str:
    """Create the container without starting it; return its id.

    Raises ImageError, SandboxError.
    """
    _require_valid(plan)
    try:
        return await _create(daemon, plan)
    except ImageError:
        await pull(daemon, plan.image)
    return await _create(daemon, plan)


async def pull(daemon: Daemon, image: str) -> None:
    """Pull an image to the daemon. Raises ImageError."""
    repository, at, tag = image.partition("@")
    if not at:
        head, slash, last = image.rpartition("/")
        last, _, tag = last.partition(":")
        repository, tag = head + slash + last, tag or "latest"

    def request(client: Any) -> str:
        lines = client.pull(repository, tag, stream=True, decode=True)
        return next((str(line["error"]) for line in lines if "error" in line), "")

    try:
        detail = await daemon.call(request)
    except SandboxError as error:
        detail = str(error).removeprefix("docker: ")
    if detail:
        name = repository.rpartition("/")[2]  # it may contain any word
        words = detail.replace(name, "").replace(tag, "")
        hint = hint_for(words, "check that the daemon can reach the registry: `docker pull`")
        raise ImageError(f"cannot pull {image}: {detail[:300]}", hint=hint)


async def remove(daemon: Daemon, container: str) -> None:
    """Kill and remove a container, if it exists, and wait until it is gone."""
    with suppress(ContainerGoneError, NameTakenError):  # its removal is already in progress
        await daemon.call(lambda client: client.remove_container(container, v=True, force=True))
        return
    for _ in range(_REMOVAL_ROUNDS):
        try:
            await daemon.call(lambda client: client.inspect_container(container))
        except ContainerGoneError:
            return
        await asyncio.sleep(_REMOVAL_PAUSE_S)
    raise SandboxError(
        f"the docker daemon does not finish removing {container[:12]}",
        hint="see `docker ps -a` and the daemon's log",
    )


def _require_valid(plan: ContainerPlan) -> None:
    if not plan.image:
        raise ImageError(
            "the sandbox has no image", hint="name an image that `docker pull` accepts"
        )
    if plan.image == "host" or plan.image.startswith(("dir:", "built:", "snapshot:")):
        raise ImageError(
            f"image {plan.image!r} belongs to the backend `local`; it is no container image",
            hint="name an image that `docker pull` accepts, or use `local`",
        )
    for mount in plan.mounts:
        if not mount.source.exists():
            raise SandboxError(
                f"cannot mount {mount.source}: there is no such folder here",
                hint="the folder must exist where the daemon runs",
            )


async def _create(daemon: Daemon, plan: ContainerPlan) -> str:
    security = security_options(daemon.info.get("SecurityOptions") or ())
    making = daemon.begin(lambda client: _request(client, plan, security))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait([making])  # otherwise a container could appear that is never removed
        raise
    except NameTakenError as error:
        raise SandboxError(
            f"there is a container {plan.name} already",
            hint=f"use another name, or `docker rm -f {plan.name}`",
        ) from error


def _request(client: Any, plan: ContainerPlan, security: Sequence[str]) -> str:
    limits, disk = plan.limits, plan.limits.disk_mib << 20
    host = client.create_host_config(
        network_mode="none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges", *security],
        mem_limit=max(limits.memory_mib << 20, _MIN_MEMORY_BYTES),
        memswap_limit=max(limits.memory_mib << 20, _MIN_MEMORY_BYTES),
        pids_limit=limits.num_processes + _OVERHEAD_PROCESSES,
        nano_cpus=int(limits.num_cpus * 1e9),
        shm_size=max(limits.memory_mib << 19, 1 << 20),
        ipc_mode="private",
        auto_remove=True,
        log_config={"Type": "none"},
        ulimits=[
            {"Name": key, "Soft": value, "Hard": value}
            for key, value in {"core": 0, "fsize": disk}.items()
        ],
        mounts=[_mount(mount) for mount in plan.mounts],
        runtime=plan.runtime or None,
    )
    host["MaskedPaths"] = [*_MASKED]
    clock_s = math.ceil(limits.lifetime_s) + _CLOCK_SLACK_S
    container = client.create_container(
        plan.image,
        entrypoint=["/bin/sh"],
        command=["-c", scripts.FIRST, "swerl", scripts.FIRST, str(clock_s), plan.workdir],
        name=plan.name if _CONTAINER_NAME.fullmatch(plan.name) else None,
        hostname=_HOSTNAME,
        user=plan.user or None,
        working_dir="/",
        stdin_open=True,
        labels=labels(plan.name, limits.lifetime_s),
        healthcheck={"test": ["NONE"]},
        host_config=host,
        use_config_proxy=False,  # it may hold a password
    )
    return str(container["Id"])


def _mount(mount: Mount) -> Mapping[str, object]:
    source = str(mount.source.absolute())
    return {"Type": "bind", "Source": source, "Target": mount.target, "ReadOnly": True}


def security_options(daemon_options: Sequence[str]) -> list[str]:
    """Return the security options to add to the daemon's own."""
    if "name=seccomp,profile=default" not in daemon_options:
        return []
    # It permits all calls but the listed ones, in native mode only.
    profile = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": list(_rules())}
    return [f"seccomp={json.dumps(profile)}"]


def _rules() -> Iterator[dict[str, Json]]:
    yield _refuse(_REFUSED)
    yield {**_refuse(_ABSENT), "errnoRet": _ENOSYS}
    for flag in _NAMESPACES:
        yield _refuse(("clone",), _compare("MASKED_EQ", flag, flag))
    for family in range(_LAST_FAMILY):
        if family not in _FAMILIES:
            yield _refuse(("socket",), _compare("EQ", family))
    yield _refuse(("socket",), _compare("GT", _LAST_FAMILY))


def _refuse(names: Sequence[str], *arguments: Json) -> dict[str, Json]:
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "args": list(arguments)}


def _compare(how: str, value: int, second: int = 0) -> Json:
    return {"index": 0, "op": f"SCMP_CMP_{how}", "value": value, "valueTwo": second}
