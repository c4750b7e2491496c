"""Intake: how many requests of all sessions one process works on; the rest wait, or are refused.

A request holds a place from before its body is read until it is answered. Sessions that wait take
turns, so that one that floods the gateway waits for itself. A request that waits is not read: it
holds its head and what the kernel buffers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from swerl.core.errors import GatewayError, Refusal


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one process takes on."""

    most_at_work: int = 1024
    """Requests at once, most of which wait for the engine. One of 94,000 tokens holds some 6 MB."""
    most_waiting: int = 1024
    """Requests that wait for a place; each holds at most 64 KiB of its body."""
    wait_s: float = 10.0
    """Seconds to wait for a place: agents wait for minutes, and ask again when refused."""


class Intake:
    """The places of one process."""

    def __init__(self, bounds: Bounds) -> None:
        self.num_at_work = 0
        self.num_waiting = 0
        self.num_refused = 0
        """Requests that found no place, since the start."""
        self.turns = Turns()
        self._bounds = bounds
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Who waits, by session; the session whose turn it is stands first."""

    @asynccontextmanager
    async def place(self, session: str) -> AsyncIterator[None]:
        """Hold a place for one request. Raises GatewayError where there is none in time."""
        if self.num_at_work < self._bounds.most_at_work and not self._waiting:
            self.num_at_work += 1
        else:
            await self._wait(session)
        try:
            yield
        finally:
            self.num_at_work -= 1
            self._call_next()

    async def _wait(self, session: str) -> None:
        self._make_room(session)
        called = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, deque()).append(called)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._bounds.wait_s):
                await called
        except TimeoutError as error:
            self._give_up(session, called)
            raise self._refused() from error
        except BaseException:
            self._give_up(session, called)
            raise

    def _make_room(self, session: str) -> None:
        """Let the session with most waiting lose its youngest, or refuse this one."""
        if self.num_waiting < self._bounds.most_waiting:
            return
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=session)
        if len(self._waiting.get(longest, ())) <= len(self._waiting.get(session, ())) + 1:
            raise self._refused()
        youngest = self._waiting[longest][-1]
        self._remove(longest, youngest)
        youngest.set_exception(self._refused())

    def _give_up(self, session: str, called: asyncio.Future[None]) -> None:
        """Leave the queue; a place that was given at the same moment goes to the next."""
        if called in self._waiting.get(session, ()):
            self._remove(session, called)
        elif called.done() and not called.cancelled() and called.exception() is None:
            self.num_at_work -= 1
            self._call_next()

    def _call_next(self) -> None:
        while self._waiting and self.num_at_work < self._bounds.most_at_work:
            session, queue = next(iter(self._waiting.items()))
            called = queue[0]
            self._remove(session, called)
            if session in self._waiting:  # its next request comes after the other sessions'
                self._waiting[session] = self._waiting.pop(session)
            if not called.done():
                self.num_at_work += 1
                called.set_result(None)

    def _remove(self, session: str, called: asyncio.Future[None]) -> None:
        self._waiting[session].remove(called)
        self.num_waiting -= 1
        if not self._waiting[session]:
            del self._waiting[session]

    def _refused(self) -> GatewayError:
        self.num_refused += 1
        message = f"the gateway has {self.num_at_work} requests at work: ask again in a moment"
        return GatewayError(message, refusal=Refusal.OVERLOADED)


class Turns:
    """Of many requests that arrive at once, lets one be worked on in each turn of the loop.

    What a request needs of the processor it needs in one go. Between two of them the loop serves
    its sockets, or a thousand first requests would stall everybody for seconds.
    """

    def __init__(self) -> None:
        self._is_free = True
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a turn of one's own."""
        loop = asyncio.get_running_loop()
        if self._is_free:
            self._is_free = False
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._next)
                return
        self._is_free = True
