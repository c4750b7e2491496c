"""What a run asks of a machine: start a process there, speak to it, learn how it ended.

`LocalNode` is this machine, `RayNode` one of a Ray cluster. Ranks, engines and checks know only
this page.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from swerl.core.errors import ClusterError
from swerl.core.files import disk_errors
from swerl.core.secrets import child_environment
from swerl.engines._process import GUARD, STOP_S, how_ended, signal_of

PYTHON = "@python"
"""As the first word of a command: the interpreter that runs swerl on that node."""
LINE_BYTES = 1 << 28
"""Longest line of a link; the log-probabilities of a batch come as one."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """A process to start."""

    argv: tuple[str, ...]
    log: Path
    """File that its output is appended to; in a folder that the nodes share."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What its environment has besides that of the node."""
    linked: bool = False
    """Whether it gets a socket for lines in both directions; its descriptor's number is appended to
    the command."""
    guarded: bool = False
    """Whether all that it began ends with it, also what left its session: for servers."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int
    """Exit code; a signal's number below zero."""
    lost: str = ""
    """Why nothing is known of it: its node is gone."""

    def __str__(self) -> str:
        return self.lost or how_ended(self.code)

    @property
    def by_signal(self) -> int:
        """Number of the signal that ended it, 0 for none."""
        return signal_of(self.code)


class Running(Protocol):
    """A process under way on a node. It is killed when the node's owner goes."""

    pid: int
    node: str
    """Name of its node."""
    ended: asyncio.Task[Ended]
    """Done when the process is. For `asyncio.wait` and `shield`: it must not be cancelled."""

    async def signal(self, number: int) -> None:
        """Send a signal; nothing once it has ended."""

    async def send(self, line: bytes) -> None:
        """Write to its link. Raises ConnectionError where it reads no more."""

    async def receive(self) -> bytes:
        """Return its next line, or nothing where no more will come."""


class Node(Protocol):
    """One machine of a run, and the GPUs on it that are the run's."""

    name: str
    """Its host name; two nodes on one machine are numbered."""
    address: str
    """Where other nodes reach it."""
    gpus: tuple[str, ...]
    """Identifiers of its GPUs, as CUDA_VISIBLE_DEVICES takes them."""

    async def start(self, order: Order) -> Running:
        """Start a process. Raises ClusterError where the node is gone or lacks the program."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of a module on the node, in a thread. Raises ClusterError."""


def interface_of(address: str) -> str:
    """Return the network interface that holds an address; `lo` where none does."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return "lo"


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def address_towards(host: str) -> str:
    """Return this machine's IPv4 address on the route to a host. Raises OSError on an unknown one.

    IPv4 alone, as are the ports of `free_port`: a name may have an address of either kind.
    """
    found = socket.getaddrinfo(host, 9, family=socket.AF_INET, type=socket.SOCK_DGRAM)
    family, _, _, _, target = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


END_S = 30.0
"""Seconds for a server to end by itself."""
_NUM_QUOTED = 3


async def end_server(process: Running | None) -> None:
    """Ask a server to end, and kill it where it does not; nothing where none was started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process is None or process.ended.done():
            return
        await process.signal(number)
        await asyncio.wait([process.ended], timeout=END_S)


def last_lines(log: Path) -> str:
    """Return the end of a server's log in one line; empty where there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(line.strip() for line in lines[-_NUM_QUOTED:])


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return the kernel's count for this process's control group, else for its machine.

    Groups below it, as sandboxes have, are not counted. `root` holds proc and sys.
    """
    for path in _counts(root):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _counts(root: Path) -> Iterator[Path]:
    """Yield files that may have the count, the narrowest first."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            # In a container the mounted folder may be the group itself.
            for place in (path.lstrip("/"), ""):
                if number == "0":
                    yield root / "sys/fs/cgroup" / place / "memory.events.local"
                elif "memory" in controllers.split(","):
                    yield root / "sys/fs/cgroup/memory" / place / "memory.oom_control"
    yield root / "proc/vmstat"


class LocalNode:
    """Implements Node on the machine that this runs on."""

    def __init__(
        self, *, name: str = "", address: str = "127.0.0.1", gpus: tuple[str, ...] = ()
    ) -> None:
        self.name = name or platform.node()
        self.address = address
        self.gpus = gpus

    async def start(self, order: Order) -> LocalProcess:
        """Start a process. Raises ClusterError."""
        ours, theirs = socket.socketpair() if order.linked else (None, None)
        try:
            process = await _spawn(order, theirs)
        except OSError as error:
            if ours:
                ours.close()
            raise ClusterError(
                f"cannot start {order.argv[0]} on {self.name}: {error.strerror}",
                hint="is it installed there at the same path?",
            ) from error
        finally:
            if theirs:
                theirs.close()
        link = await asyncio.open_connection(sock=ours, limit=LINE_BYTES) if ours else None
        return LocalProcess(process, self.name, link)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread."""
        return await asyncio.to_thread(function, *args, **kwargs)


class LocalProcess:
    """Implements Running."""

    def __init__(
        self,
        process: Process,
        node: str,
        link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None,
    ) -> None:
        self.pid = process.pid
        self.node = node
        self._process = process
        self._link = link
        self.ended = asyncio.create_task(self._wait())

    async def signal(self, number: int) -> None:
        """Send a signal; nothing once it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def send(self, line: bytes) -> None:
        """Write to its link. Raises ConnectionError where it reads no more."""
        assert self._link is not None
        self._link[1].write(line)
        await self._link[1].drain()

    async def receive(self) -> bytes:
        """Return its next line, or nothing where no more will come."""
        assert self._link is not None
        try:
            return await self._link[0].readline()
        except ConnectionError:
            return b""

    async def _wait(self) -> Ended:
        code = await self._process.wait()
        if self._link is not None:
            self._link[1].close()
        return Ended(code)


async def _spawn(order: Order, link: socket.socket | None) -> Process:
    argv = list(order.argv)
    if argv[0] == PYTHON:
        argv[0] = sys.executable
    if link is not None:
        argv.append(str(link.fileno()))
    if order.guarded:
        argv = [sys.executable, "-S", str(GUARD), str(os.getpid()), str(STOP_S), *argv]
    with disk_errors(order.log), order.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(**order.env) if order.env else None,
            pass_fds=() if link is None else (link.fileno(),),
            # Ctrl-C is for the controller, which then ends its processes in order.
            start_new_session=True,
        )
