"""This machine as a Node: processes of its own, spoken to over socket pairs."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from swerl.cluster.node import LINE_BYTES, PYTHON, Ended, Order
from swerl.core.errors import ClusterError
from swerl.core.files import disk_errors
from swerl.core.secrets import child_environment
from swerl.engines._process import GUARD, STOP_S

P = ParamSpec("P")
T = TypeVar("T")


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
