"""A Ray cluster of the run's own: its head on this machine, one member on each host.

Every member is started through a command such as ssh or srun and lives as long as that command's
standard input is open (`cluster/join.py`), so nothing is left on a host when the run ends, also
when it is killed. The cluster has a token of its own, which travels by standard input, not by a
command line.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import shutil
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path

from swerl.cluster.network import address_towards, free_port
from swerl.cluster.ray_daemons import START_S, ray_start, start_head, tail
from swerl.core.errors import ClusterError
from swerl.core.secrets import lent

END_S = 20.0
"""Seconds for a member to clean up after itself."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Which hosts, and how to run something there."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    """Runs what follows on the host that is the first word after it."""
    logs: Path
    gpus_per_node: int
    cpus_per_node: int
    head_address: str = ""


@asynccontextmanager
async def host_cluster(plan: HostPlan) -> AsyncIterator[str]:
    """Yield the address of a Ray cluster of these hosts. Raises ClusterError naming the host."""
    _require_ray()
    address = plan.head_address or _address_towards(plan.hosts)
    token = _token()
    folder = Path(tempfile.mkdtemp(prefix="swerl-ray-", dir="/tmp"))  # sockets have short paths
    port = free_port(address)
    head = f"{address}:{port}"
    with lent("RAY_AUTH_MODE", "token"), lent("RAY_AUTH_TOKEN", token):
        async with AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            command = ray_start(address, cpus=0, gpus=0)
            command += ["--head", f"--port={port}", f"--temp-dir={folder}"]
            command += ["--include-dashboard=false"]
            log = plan.logs / "ray-head.log"
            await start_head(stack, command, log)
            order: dict[str, str | int] = {
                "head": head,
                "token": token,
                "cpus": plan.cpus_per_node,
                "gpus": plan.gpus_per_node,
                "folder": str(folder),
            }
            await _join_all(stack, [_member(plan, host, order) for host in plan.hosts])
            yield head


@cache
def _token() -> str:
    """Return what this process's clusters are entered with: Ray reads it once a process."""
    return secrets.token_hex(32)


async def _join_all(
    stack: AsyncExitStack, members: Sequence[AbstractAsyncContextManager[None]]
) -> None:
    """Enter all at once; where one fails, those under way end themselves."""
    try:
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(stack.enter_async_context(member))
    except* ClusterError as failed:
        raise failed.exceptions[0] from None


@asynccontextmanager
async def _member(plan: HostPlan, host: str, order: Mapping[str, str | int]) -> AsyncIterator[None]:
    log = plan.logs / f"ray-{host}.log"
    remote = [sys.executable, "-m", "swerl.cluster.join"]
    process = await _run(plan.command, host, remote, log)
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        with suppress(ConnectionError):
            await process.stdin.drain()
        await _until_joined(process, host, log)
        yield
    finally:
        process.stdin.close()
        await asyncio.shield(_ended(process))


async def _run(command: Sequence[str], host: str, remote: Sequence[str], log: Path) -> Process:
    pipe = asyncio.subprocess.PIPE
    # A shell on the host takes the command as one text; srun takes words.
    words = remote if Path(command[0]).name == "srun" else [shlex.join(remote)]
    try:
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *(*command, host, *words),
                stdin=pipe,
                stdout=pipe,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        raise ClusterError(
            f"cannot run {command[0]}: {error.strerror}",
            hint="set cluster.ssh, or cluster.launcher",
        ) from error


async def _until_joined(process: Process, host: str, log: Path) -> None:
    assert process.stdout
    said = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            said = await process.stdout.readline()
    if said.strip() == b"joined":
        return
    message = f"host {host} did not join the run's Ray cluster: {tail(log)}"
    hint = f"swerl must be installed there at {sys.executable}; the whole log is {log}"
    raise ClusterError(message, hint=hint)


async def _ended(process: Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
            return
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _address_towards(hosts: Sequence[str]) -> str:
    """Return this machine's address that all hosts reach.

    One of them may be this machine, which often knows its own name as a loopback address.
    """
    found = []
    for host in hosts:
        name = host.rpartition("@")[2]
        try:
            found.append(address_towards(name))
        except OSError as error:
            message = f"host {host} is unknown: {error}"
            hint = "set cluster.head_address to this machine's address that the hosts reach"
            raise ClusterError(message, hint=hint) from error
    return next((each for each in found if not ip_address(each).is_loopback), found[0])


def _require_ray() -> None:
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise ClusterError(
            "Ray is not installed", hint="pip install 'swerl[cluster]' on every machine"
        )
