"""The controller's end of one warden's socket: requests out, answers in, the end noticed."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from swerl.core.chat import Json
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.sandboxes._local import wire
from swerl.sandboxes._local.wire import Command, Packet


class Request(Protocol):
    """Builds a message that carries its request's number."""

    def __call__(self, number: int) -> Command | Mapping[str, Json]: ...


class Link:
    """Pairs a warden's answers with the requests that wait for them."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Packet]] = {}
        self._reason = "its warden was killed"
        self._from_inside = False
        self.first: asyncio.Future[Packet] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)

    async def ask(
        self, request: Request, fds: Sequence[int] = ()
    ) -> tuple[int, asyncio.Future[Packet]]:
        """Send a request; return its number and the future of its answer."""
        number = next(self._numbers)
        answer: asyncio.Future[Packet] = self._loop.create_future()
        self._waiting[number] = answer
        await self.tell(request(number), fds)
        return number, answer

    async def tell(self, body: Command | Mapping[str, Json], fds: Sequence[int] = ()) -> None:
        """Send a message. Raises SandboxLostError when the sandbox is gone."""
        while True:
            self.require_alive()
            try:
                wire.send(self._sock, body, fds)
            except BlockingIOError:
                await asyncio.sleep(0.001)  # the warden is busy and its queue is full
            except OSError as error:
                raise self._lost() from error
            else:
                return

    def tell_now(self, body: Mapping[str, Json]) -> None:
        """Send a message if that needs no wait; used where no wait is allowed."""
        try:
            wire.send(self._sock, body)
        except OSError:
            self.hang_up()

    def require_alive(self) -> None:
        """Raise SandboxLostError when the sandbox is gone."""
        if self.ended.done():
            raise self._lost()

    async def close(self) -> None:
        """Ask the warden to end everything and wait until it has."""
        self.hang_up()
        await asyncio.shield(self.ended)

    def hang_up(self) -> None:
        """Ask the warden to end everything."""
        if not self.ended.done():
            self._reason = "it is closed"
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._end()

    def drop_unread(self) -> None:
        """Close the descriptors of a first message that nobody took up."""
        if self.first.done() and not self.first.cancelled() and not self.first.exception():
            _drop(self.first.result())

    def _receive(self) -> None:
        try:
            packet = wire.receive(self._sock)
        except BlockingIOError:
            return
        if packet is None:
            self._end()
        elif "lost" in packet.body:
            self._reason = str(packet.body["lost"])
            self._from_inside = bool(packet.body["from_inside"])
        elif "number" in packet.body:
            self._answer(packet)
        elif not self.first.done():
            self.first.set_result(packet)
        else:
            _drop(packet)

    def _answer(self, packet: Packet) -> None:
        number = packet.body["number"]
        waiting = self._waiting.pop(number, None) if isinstance(number, int) else None
        if waiting is None or waiting.done():
            _drop(packet)
        elif "refused" in packet.body:
            message = f"sandbox {self._name} cannot start a command: {packet.body['refused']}"
            hint = "its processes use up its limits; raise num_processes or memory_mib"
            waiting.set_exception(SandboxError(message, hint=hint, from_inside=True))
            waiting.exception()  # nobody needs to wait for it
        else:
            waiting.set_result(packet)

    def _end(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if not self.ended.done():
            self.ended.set_result(None)
        for future in (self.first, *self._waiting.values()):
            if not future.done():
                future.set_exception(self._lost())
                future.exception()  # nobody needs to wait for it
        self._waiting.clear()

    def _lost(self) -> SandboxLostError:
        hint = "open a fresh sandbox; `dmesg` tells whether the kernel ran out of memory"
        message = f"sandbox {self._name} is gone: {self._reason}"
        return SandboxLostError(message, hint=hint, from_inside=self._from_inside)


def _drop(packet: Packet) -> None:
    for fd in packet.fds:
        os.close(fd)
    packet.fds.clear()
