"""A Ray cluster for one run: its head on this machine, one member on each host.

A command such as ssh or srun starts each member (`cluster/join.py`), which runs as long as the
command's standard input is open. So hosts are left clean when the run ends, even if it is killed.
The cluster's token travels by standard input, never on a command line.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from swerl.cluster.node import address_towards, free_port, last_lines
from swerl.core.errors import ClusterError
from swerl.core.secrets import lent, slurm_node_list
from swerl.engines._process import child

END_S = 20.0
"""Seconds that a member has to clean up."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The hosts of a cluster, and the command that runs a program there."""

    hosts: tuple[str, ...]
    command: tuple[str, ...]
    """Its next word is the host, followed by the program to run there."""
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
    # Ray reads the token from the environment of this process.
    with lent("RAY_AUTH_MODE", "token"), lent("RAY_AUTH_TOKEN", token):
        async with AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            command = ray_start(address, cpus=0, gpus=0)
            command += ["--head", f"--port={port}", f"--temp-dir={folder}"]
            command += ["--include-dashboard=false"]
            log = plan.logs / "ray-head.log"
            await start_head(stack, command, log)
            settings: dict[str, str | int] = {
                "head": head,
                "token": token,
                "cpus": plan.cpus_per_node,
                "gpus": plan.gpus_per_node,
                "folder": str(folder),
            }
            await _join_all(stack, [_member(plan, host, settings) for host in plan.hosts])
            yield head


@cache
def _token() -> str:
    """Return the token of all clusters of this process: Ray reads it once per process."""
    return secrets.token_hex(32)


async def _join_all(
    stack: AsyncExitStack, members: Sequence[AbstractAsyncContextManager[None]]
) -> None:
    """Enter all concurrently; if one fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(stack.enter_async_context(member))
    except* ClusterError as failed:
        # The other members were cancelled, so only the first error has a cause.
        raise failed.exceptions[0] from None


@asynccontextmanager
async def _member(
    plan: HostPlan, host: str, settings: Mapping[str, str | int]
) -> AsyncIterator[None]:
    log = plan.logs / f"ray-{host}.log"
    remote = [sys.executable, "-m", "swerl.cluster.join"]
    process = await _run(plan.command, host, remote, log)
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        with suppress(ConnectionError):
            await process.stdin.drain()
        await _until_joined(process, host, log)
        yield
    finally:
        process.stdin.close()
        # A cancelled run must not leave a member behind.
        await asyncio.shield(_ended(process))


async def _run(command: Sequence[str], host: str, remote: Sequence[str], log: Path) -> Process:
    pipe = asyncio.subprocess.PIPE
    # A remote shell takes the command as one string; srun takes separate words.
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
    answer = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            answer = await process.stdout.readline()
    if answer.strip() == b"joined":
        return
    message = (
        f"host {host} did not join the run's Ray cluster: {last_lines(log) or 'its log is empty'}"
    )
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

    One host may be this machine, whose own name often resolves to a loopback address.
    """
    found = []
    for host in hosts:
        # A host may be written as user@host.
        name = host.rpartition("@")[2]
        try:
            found.append(address_towards(name))
        except OSError as error:
            message = f"host {host} is unknown: {error}"
            hint = "set cluster.head_address to this machine's address that the hosts reach"
            raise ClusterError(message, hint=hint) from error
    return next((each for each in found if not ip_address(each).is_loopback), found[0])


def _require_ray() -> None:
    if find_spec("ray") is None:
        raise ClusterError(
            "Ray is not installed", hint="pip install 'swerl[cluster]' on every machine"
        )


HOSTNAMES_S = 30.0


def slurm_hosts(gpus_per_node: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the hosts of the Slurm allocation, and the command that runs a program on one.

    Raises ClusterError outside an allocation.
    """
    listed = slurm_node_list()
    if not listed:
        message = "cluster.launcher = 'slurm', but this process is in no Slurm allocation"
        hint = "`swerl train manifest slurm RECIPE` prints a script for sbatch"
        raise ClusterError(message, hint=hint)
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            capture_output=True,
            text=True,
            timeout=HOSTNAMES_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"scontrol cannot read the node list {listed!r}: {error}",
            hint="run this on a machine that has Slurm's commands",
        ) from error
    gpus = (f"--gpus-per-node={gpus_per_node}",) if gpus_per_node else ()
    # --overlap: other steps may hold the same resources. Without --exact a step gets all cores of
    # its machine; with it, or with srun's CPU binding, it would get one core for its one task.
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", *gpus)
    return tuple(done.stdout.split()), (*step, "--nodelist")


START_S = 180.0
"""Seconds for a member to join: on a slow file system most of them go into Python's imports."""
TRIES = 3
"""Attempts to start: Ray allows each 30 seconds, and a busy machine may need more."""
RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""No usage reports; and no `nice` for ranks, which are Ray's children."""


def ray_start(address: str, *, cpus: int, gpus: int) -> list[str]:
    """Return the command that starts Ray's daemons on this machine and ends with them."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--node-ip-address={address}", "--disable-usage-stats", "--log-style=record"]
    return [*command, f"--num-cpus={cpus}", f"--num-gpus={gpus}"]


async def start_head(stack: AsyncExitStack, command: Sequence[str], log: Path) -> None:
    """Start the head, again if a busy machine was too slow. Raises ClusterError."""
    for _ in range(TRIES):
        # An earlier attempt may have written to the same log.
        begin = log.stat().st_size if log.exists() else 0
        running = child(command, log, env=RAY_SETTINGS)
        process = await stack.enter_async_context(running)
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    if has_started(log, begin):
                        return
                    await asyncio.sleep(0.1)
        # It runs but is not ready: another attempt would not help.
        if process.returncode is None:
            break
    raise ClusterError(
        f"Ray's head did not come up: {last_lines(log) or 'its log is empty'}",
        hint=f"the whole log is {log}",
    )


def has_started(log: Path, begin: int = 0) -> bool:
    """Return whether Ray's log reports running daemons after byte `begin`."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(begin)
        return b"Ray runtime started" in file.read()
    return False
