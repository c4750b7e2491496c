"""The lines between a relay's two halves, numbered so that a broken link loses none.

`F <number> <kind> <connection> <payload>` is a frame; payloads are text. `A <number>`: every frame
up to this one arrived. `H <number>`: the same at the start of a link, before any frame; it asks for
the later ones again. `P` asks for an A. Lines are ASCII, because some providers carry streams as
text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

_BATCH_BYTES = 1 << 17
_MAX_LINE_BYTES = 1 << 16
_MOST_KEPT_BYTES = 1 << 27
"""Most bytes kept for a half that acknowledges nothing: more than all connections can owe."""


class Kind(StrEnum):
    """What a frame says about its connection."""

    OPEN = "O"
    """A program in the sandbox connected."""
    DATA = "D"
    """Bytes, in base64."""
    END = "E"
    """No more data will come from this side."""
    RESET = "R"
    """The connection broke."""
    WINDOW = "W"
    """So many bytes were passed on, and as many more may come."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One event of one connection."""

    kind: Kind
    connection: int
    payload: str = ""


class Wire:
    """The controller's end of the lines."""

    def __init__(self) -> None:
        self._something_to_say = asyncio.Event()
        self.forget()

    def forget(self) -> None:
        """Begin anew, with a half that has never heard of this one."""
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._sent = 0
        self._received = 0
        self.begin_link()

    def begin_link(self) -> None:
        """Drop what a broken link left half said."""
        self._partial = b""
        self._greeted = False
        self._out = bytearray(b"H %d\n" % self._received)
        self._something_to_say.set()

    def push(self, frame: Frame) -> None:
        """Say a frame, as often as it takes to arrive."""
        self._sent += 1
        text = f"F {self._sent} {frame.kind} {frame.connection} {frame.payload}\n".encode()
        self._unacknowledged.append((self._sent, text))
        self._kept_bytes += len(text)
        if self._greeted:
            self._say(text)

    async def outgoing(self) -> bytes:
        """Wait for lines to send, and return some."""
        await self._something_to_say.wait()
        piece = bytes(self._out[:_BATCH_BYTES])
        del self._out[:_BATCH_BYTES]
        if not self._out:
            self._something_to_say.clear()
        return piece

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._say(b"P\n")

    def take(self, data: bytes) -> Iterator[Frame]:
        """Read what the other half said, and yield its new frames.

        Raises ValueError on what no relay says.
        """
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_LINE_BYTES:
            raise ValueError("a line of the relay is endless")
        if self._kept_bytes > _MOST_KEPT_BYTES:
            raise ValueError("the relay acknowledges nothing")
        before = self._received
        for line in lines:
            frame = self._read(line.decode("ascii").split(" "))
            if frame:
                yield frame
        if self._received > before:
            self._say(b"A %d\n" % self._received)

    def _read(self, words: list[str]) -> Frame | None:
        match words:
            case ["A" | "H" as word, number]:
                self._acknowledge(int(number))
                if word == "H" and not self._greeted:
                    self._greeted = True
                    self._say(b"".join(text for _, text in self._unacknowledged))
            case ["F", number, kind, connection, payload]:
                if int(number) > self._received + 1:
                    raise ValueError(f"frame {self._received + 1} of the relay is missing")
                if int(number) == self._received + 1:
                    self._received += 1
                    return Frame(Kind(kind), int(connection), payload)
            case _:
                raise ValueError(f"the relay said {' '.join(words)!r:.60}")
        return None

    def _acknowledge(self, upto: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= upto:
            self._kept_bytes -= len(self._unacknowledged.popleft()[1])

    def _say(self, text: bytes) -> None:
        self._out += text
        self._something_to_say.set()
