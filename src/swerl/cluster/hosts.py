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
import subprocess
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path

from swerl.cluster.node import address_towards, free_port
from swerl.core.errors import ClusterError
from swerl.core.secrets import lent, slurm_node_list
from swerl.engines._process import child

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


HOSTNAMES_S = 30.0


def slurm_hosts(gpus_per_node: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the allocation's hosts, and the command that runs another on the host after it.

    Raises ClusterError outside of an allocation.
    """
    listed = slurm_node_list()
    if not listed:
        message = "cluster.launcher = 'slurm', and this process is in no Slurm allocation"
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
            hint="run this where Slurm's commands are",
        ) from error
    gpus = (f"--gpus-per-node={gpus_per_node}",) if gpus_per_node else ()
    # --overlap: others' steps may hold the same resources. Without --exact a step has all cores of
    # its machine; with it, and with srun's binding, it would have the one core of its one task.
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", *gpus)
    return tuple(done.stdout.split()), (*step, "--nodelist")


START_S = 180.0
"""Seconds for a member to join: a slow file system takes most of them to read Python's packages."""
TRIES = 3
"""Ray gives a machine 30 seconds to start; one that is busy for a while may need more."""
RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Nothing is reported to anybody; and ranks, being Ray's children, do not yield to others."""


def ray_start(address: str, *, cpus: int, gpus: int) -> list[str]:
    """Return the command that starts Ray's daemons here and ends with them."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--node-ip-address={address}", "--disable-usage-stats", "--log-style=record"]
    return [*command, f"--num-cpus={cpus}", f"--num-gpus={gpus}"]


async def start_head(stack: AsyncExitStack, command: Sequence[str], log: Path) -> None:
    """Start the head, again where a busy machine was too slow for it. Raises ClusterError."""
    for _ in range(TRIES):
        begin = log.stat().st_size if log.exists() else 0
        running = child(command, log, env=RAY_SETTINGS)
        process = await stack.enter_async_context(running)
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    if has_started(log, begin):
                        return
                    await asyncio.sleep(0.1)
        if process.returncode is None:
            break
    raise ClusterError(f"Ray's head did not come up: {tail(log)}", hint=f"its whole log is {log}")


def has_started(log: Path, begin: int = 0) -> bool:
    """Return whether Ray says in its log, from byte `begin` on, that its daemons run."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(begin)
        return b"Ray runtime started" in file.read()
    return False


def tail(log: Path) -> str:
    """Return the last words of a log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(line.strip() for line in lines[-3:]) or "it said nothing"
