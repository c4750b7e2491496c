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
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.cluster.network import address_towards, free_port
from swerl.engines._process import child
from swerl.errors import ClusterError
from swerl.secrets import lent

START_S = 180.0
"""Seconds for a member to join: a slow file system takes most of them to read Python's packages."""
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
    address = plan.head_address or _address_towards(plan.hosts[0])
    token = secrets.token_hex(32)
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
            process = await stack.enter_async_context(child(command, log, env=RAY_SETTINGS))
            await _until_up(process, address, port, log)
            await _join_all(stack, [_member(plan, host, head, token) for host in plan.hosts])
            yield head


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


RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Nothing is reported to anybody; and ranks, being Ray's children, do not yield to others."""


def ray_start(address: str, *, cpus: int, gpus: int) -> list[str]:
    """Return the command that starts Ray's daemons here and ends with them."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--node-ip-address={address}", "--disable-usage-stats", "--log-style=record"]
    return [*command, f"--num-cpus={cpus}", f"--num-gpus={gpus}"]


@asynccontextmanager
async def _member(plan: HostPlan, host: str, head: str, token: str) -> AsyncIterator[None]:
    log = plan.logs / f"ray-{host}.log"
    remote = [sys.executable, "-m", "swerl.cluster.join"]
    order = {"head": head, "token": token, "cpus": plan.cpus_per_node, "gpus": plan.gpus_per_node}
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
        message = f"cannot run {command[0]}: {error.strerror}"
        raise ClusterError(message, hint="set cluster.ssh, or cluster.launcher") from error


async def _until_joined(process: Process, host: str, log: Path) -> None:
    assert process.stdout
    said = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            said = await process.stdout.readline()
    if said.strip() == b"joined":
        return
    message = f"host {host} did not join the run's Ray cluster: {_tail(log)}"
    hint = f"swerl must be installed there at {sys.executable}; the whole log is {log}"
    raise ClusterError(message, hint=hint)


async def _until_up(process: Process, address: str, port: int, log: Path) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                try:
                    _, writer = await asyncio.open_connection(address, port)
                except OSError:
                    await asyncio.sleep(0.1)
                    continue
                writer.close()
                return
    message = f"Ray's head did not come up at {address}:{port}: {_tail(log)}"
    raise ClusterError(message, hint=f"its whole log is {log}")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(line.strip() for line in lines[-3:]) or "it said nothing"


async def _ended(process: Process) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
            return
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _address_towards(host: str) -> str:
    name = host.rpartition("@")[2]
    try:
        return address_towards(name)
    except OSError as error:
        message = f"host {host} is unknown: {error}"
        hint = "set cluster.head_address to this machine's address that the hosts reach"
        raise ClusterError(message, hint=hint) from error


def _require_ray() -> None:
    from importlib.util import find_spec

    if find_spec("ray") is None:
        message = "Ray is not installed"
        raise ClusterError(message, hint="pip install 'swerl[cluster]' on every machine")
