"""Nodes: the machines of a run, on which it starts processes and exchanges lines with them.

`LocalNode` is this machine, `RayNode` one of a Ray cluster. Ranks, engines and checks use only the
Protocols of this file.
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
"""Longest line of a link; the log-probabilities of a batch are one line."""
END_S = 30.0
"""Seconds that a server has to end after SIGTERM."""
_NUM_QUOTED = 3

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    argv: tuple[str, ...]
    log: Path
    """File to append its output to, in a folder that the nodes share."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the node's environment."""
    linked: bool = False
    """Open a socket for lines in both directions; its descriptor is appended to the command."""
    guarded: bool = False
    """Kill all its descendants with it, also those that left its session: for servers."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    code: int
    """Exit code; the negative number of a signal."""
    lost: str = ""
    """Set if the exit code is unknown because the node is gone."""

    def __str__(self) -> str:
        return self.lost or how_ended(self.code)

    @property
    def by_signal(self) -> int:
        """Number of the signal that ended it, 0 for none."""
        return signal_of(self.code)


class RunningProcess(Protocol):
    """A process on a node. It is killed when the node's owner ends."""

    pid: int
    node: str
    """Name of its node."""
    ended: asyncio.Task[ProcessEnd]
    """Done when the process ends. Use `asyncio.wait` or `shield`: it must not be cancelled."""

    async def signal(self, number: int) -> None:
        """Send a signal; does nothing after its end."""

    async def send(self, line: bytes) -> None:
        """Write to its link. Raises ConnectionError if the link is closed."""

    async def receive(self) -> bytes:
        """Return the next line from its link, or b"" at the end."""


class Node(Protocol):
    """One machine of a run, and the run's GPUs on it."""

    name: str
    """Its host name; two nodes on one machine are numbered."""
    address: str
    """Address at which other nodes reach it."""
    gpus: tuple[str, ...]
    """Identifiers of its GPUs, as CUDA_VISIBLE_DEVICES takes them."""

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        """Start a process. Raises ClusterError if the node is gone or lacks the program."""

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of a module on the node, in a thread. Raises ClusterError."""


class LocalNode:
    """Implements Node on this machine; links are socket pairs."""

    def __init__(
        self, *, name: str = "", address: str = "127.0.0.1", gpus: tuple[str, ...] = ()
    ) -> None:
        self.name = name or platform.node()
        self.address = address
        self.gpus = gpus

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        ours, theirs = socket.socketpair() if spec.linked else (None, None)
        try:
            process = await _spawn(spec, theirs)
        except OSError as error:
            if ours:
                ours.close()
            raise ClusterError(
                f"cannot start {spec.argv[0]} on {self.name}: {error.strerror}",
                hint="is it installed there at the same path?",
            ) from error
        finally:
            # The child has a copy of its own.
            if theirs:
                theirs.close()
        link = await asyncio.open_connection(sock=ours, limit=LINE_BYTES) if ours else None
        return LocalProcess(process, self.name, link)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(function, *args, **kwargs)


class NodePart:
    """A machine with a part of its GPUs. Implements Node."""

    def __init__(self, whole: Node, gpus: tuple[str, ...]) -> None:
        self.whole = whole
        self.name = whole.name
        self.address = whole.address
        self.gpus = gpus

    async def start(self, spec: ProcessSpec) -> RunningProcess:
        return await self.whole.start(spec)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.whole.call(function, *args, **kwargs)


class LocalProcess:
    """Implements RunningProcess."""

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
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def send(self, line: bytes) -> None:
        assert self._link is not None
        self._link[1].write(line)
        await self._link[1].drain()

    async def receive(self) -> bytes:
        assert self._link is not None
        try:
            return await self._link[0].readline()
        except ConnectionError:
            return b""

    async def _wait(self) -> ProcessEnd:
        code = await self._process.wait()
        if self._link is not None:
            self._link[1].close()
        return ProcessEnd(code)


async def _spawn(spec: ProcessSpec, link: socket.socket | None) -> Process:
    argv = list(spec.argv)
    if argv[0] == PYTHON:
        argv[0] = sys.executable
    if link is not None:
        argv.append(str(link.fileno()))
    if spec.guarded:
        # The guard is the parent of the program and kills what it leaves.
        argv = [sys.executable, "-S", str(GUARD), str(os.getpid()), str(STOP_S), *argv]
    with disk_errors(spec.log), spec.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(**spec.env) if spec.env else None,
            pass_fds=() if link is None else (link.fileno(),),
            # Ctrl-C reaches only the controller, which then ends its processes in order.
            start_new_session=True,
        )


async def end_server(process: RunningProcess | None) -> None:
    """End a server with SIGTERM, after END_S with SIGKILL; None does nothing."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process is None or process.ended.done():
            return
        await process.signal(number)
        await asyncio.wait([process.ended], timeout=END_S)


def last_lines(log: Path) -> str:
    """Return the end of a log in one line; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "; ".join(line.strip() for line in lines[-_NUM_QUOTED:])


def interface_of(address: str) -> str:
    """Return the network interface that holds an address; `lo` if none does."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return "lo"


def num_oom_kills(root: Path = Path("/")) -> int:
    """Return the kernel's out-of-memory kills in this process's control group, else on its machine.

    The groups of sandboxes below it are not counted. `root` holds proc and sys.
    """
    for path in _oom_files(root):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _oom_files(root: Path) -> Iterator[Path]:
    """Yield files that may have the count, the narrowest first."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            # In a container the mounted folder may be the group itself.
            for folder in (path.lstrip("/"), ""):
                if number == "0":
                    yield root / "sys/fs/cgroup" / folder / "memory.events.local"
                elif "memory" in controllers.split(","):
                    yield root / "sys/fs/cgroup/memory" / folder / "memory.oom_control"
    yield root / "proc/vmstat"
