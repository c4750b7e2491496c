"""What a command prints: where it ends, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from swerl.sandbox import Chunk

_CODE_DIGITS = 3


class Seam:
    """Finds the token and the exit code behind it that end one stream of a command."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._held = b""

    def take(self, data: bytes) -> tuple[bytes, int | None]:
        """Return the text in `data`, and the exit code once the token and it have come."""
        data = self._held + data
        place = data.find(self._token)
        if place < 0:
            size = _overlap(data, self._token)
            text, self._held = data[: len(data) - size], data[len(data) - size :]
            return text, None
        code = data[place + len(self._token) :][:_CODE_DIGITS]
        if len(code) < _CODE_DIGITS:
            self._held = data[place:]
            return data[:place], None
        self._held = b""
        return data[:place], int(code)


@dataclass(slots=True)
class Kept:
    """What is kept of a command's output: `cap` bytes of each stream."""

    cap: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    """Whether anything was dropped."""
    timed_out: bool = False

    def add(self, chunk: Chunk) -> bool:
        """Keep what fits; return whether all of it did."""
        stream = self.stderr if chunk.is_stderr else self.stdout
        room = self.cap - len(stream)
        stream += chunk.data[:room]
        if len(chunk.data) <= room:
            return True
        self.truncated = True
        return False


def _overlap(data: bytes, token: bytes) -> int:
    """Return how many bytes at the end of `data` may be the beginning of `token`."""
    tail = data[-(len(token) - 1) :]
    start = tail.find(token[:1])
    while start >= 0:
        if token.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(token[:1], start + 1)
    return 0
