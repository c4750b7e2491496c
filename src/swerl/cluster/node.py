"""What a run asks of a machine: start a process there, speak to it, learn how it ended.

`LocalNode` is this machine, `RayNode` one of a Ray cluster. Ranks, engines and checks know only
this page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from swerl.engines._process import how_ended, signal_of

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
