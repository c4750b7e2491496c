"""The controller's line to a container's keeper: orders in, answers out, the end noticed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from swerl.sandboxes._docker.hijack import Stream

_MARK_TOP = 1 << 40
_MOST_WAITING_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Ready:
    """What the keeper says when it begins."""

    user_id: int
    group_id: int
    user_name: str
    has_workdir: bool


class Marks:
    """The marks of one sandbox's commands; each is lower than all before it."""

    def __init__(self) -> None:
        self._last = _MARK_TOP

    def next(self) -> int:
        """Give out a mark."""
        self._last -= 1
        return self._last

    def order(self, signal: str, mark: int) -> str:
        """Return the order that sends a signal to the processes with this mark."""
        return f"{signal} {mark} {self._last} {_MARK_TOP - 1}"


class Keeper:
    """A keeper under way."""

    def __init__(self, stream: Stream, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self.ready: asyncio.Future[Ready | None] = asyncio.get_running_loop().create_future()
        """What it says first; None where it ends before."""
        self._listening = asyncio.ensure_future(self._listen())

    async def obey(self, order: str) -> None:
        """Give an order and wait until it is carried out. Raises ConnectionError."""
        number = next(self._numbers)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = order, done
        try:
            await self._stream.send(f"{number} {order}\n".encode())
            await done
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Let go of it; it ends, and its container with it."""
        self._listening.cancel()
        self._stream.close()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        text = b""
        try:
            while read := await self._stream.read():
                *lines, text = (text + read[0]).split(b"\n")
                for line in lines:
                    await self._hear(line.decode("ascii", "replace").split())
                text = text[-_MOST_WAITING_BYTES:]
        finally:
            if not self.ready.done():
                self.ready.set_result(None)
            for _, done in self._waiting.values():
                if not done.done():
                    done.set_exception(ConnectionResetError("the keeper is gone"))
                    done.exception()  # nobody needs to wait for it
            self._on_end()

    async def _hear(self, words: list[str]) -> None:
        if words[:1] == ["ready"] and len(words) == 5:
            if not self.ready.done():
                self.ready.set_result(_read_ready(words))
            # an agent may have killed the one before, with its orders
            for number, (order, _) in list(self._waiting.items()):
                await self._stream.send(f"{number} {order}\n".encode())
        elif words[:1] == ["done"] and words[1:] and words[1].isdigit():
            _, done = self._waiting.get(int(words[1]), ("", None))
            if done and not done.done():
                done.set_result(None)


def _read_ready(words: list[str]) -> Ready:
    return Ready(int(words[1]), int(words[2]), words[3], words[4] == "yes")
