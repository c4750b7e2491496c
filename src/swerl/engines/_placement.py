"""Which server a session's requests go to: always the same, so that its prefix is cached there."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence

IDLE_S = 1800.0
"""Seconds after which a silent session is forgotten: the longest a tool usually runs."""


class Placement:
    """Sessions by URL. A new one goes where the fewest are; equals are told apart by its hash.

    So few sessions spread evenly, and the clients of several processes do not all begin with the
    same server.
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._num_at: Counter[str] = Counter()

    def place(self, session: str, urls: Sequence[str]) -> str:
        """Return one of `urls`, the one of last time where it is still among them."""
        now = time.monotonic()
        self._forget(now - IDLE_S)
        home = self._homes.pop(session, ("", 0.0))[0]
        if home:
            self._num_at[home] -= 1
        if home not in urls:
            home = min(urls, key=lambda url: (self._num_at[url], _hash(session, url)))
        self._homes[session] = (home, now)
        self._num_at[home] += 1
        return home

    def _forget(self, before: float) -> None:
        while self._homes:
            session, (home, seen) = next(iter(self._homes.items()))
            if seen > before:
                return
            del self._homes[session]
            self._num_at[home] -= 1


def _hash(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
