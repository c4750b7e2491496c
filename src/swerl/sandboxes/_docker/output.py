"""What a command prints: where it ends, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from swerl.sandboxes._kept import Kept

_WORD_BYTES = 3


class Seam:
    """Takes the words of the frame around a command out of one of its streams.

    A word is three bytes behind a token: `run` as the command begins, `end` as it ends.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._held = b""

    def take(self, data: bytes) -> tuple[bytes, list[str]]:
        """Return the command's own bytes in `data`, and the words between them."""
        data, text = self._held + data, b""
        words: list[str] = []
        while (place := data.find(self._token)) >= 0:
            text, rest = text + data[:place], data[place + len(self._token) :]
            if len(rest) < _WORD_BYTES:
                self._held = data[place:]
                return text, words
            words.append(rest[:_WORD_BYTES].decode("ascii", "replace"))
            data = rest[_WORD_BYTES:]
        size = _overlap(data, self._token)
        self._held = data[len(data) - size :]
        return text + data[: len(data) - size], words


@dataclass(slots=True)
class KeptUntil(Kept):
    """The same, and whether the timeout ended it."""

    timed_out: bool = False


def _overlap(data: bytes, token: bytes) -> int:
    """Return how many bytes at the end of `data` may be the beginning of `token`."""
    tail = data[-(len(token) - 1) :]
    start = tail.find(token[:1])
    while start >= 0:
        if token.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(token[:1], start + 1)
    return 0
