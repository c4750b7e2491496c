"""Which requests are one and the same, asked again: a client's retry is answered once.

Two requests are twins where the same asker puts the same new messages to the same place of the
conversation, with the same `max_tokens`. That alone is no retry: sub-agents ask alike. A twin is
given the first one's answer where
- that is in the making or undelivered, and its client is gone, or the asker has a name;
- it was delivered to a connection that broke, and nothing was said after it;
- the client says itself that it asks again.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swerl.gateway.answer import Answer

RETRY_S = 1.5
"""Seconds for which a reply is kept whose client left. Agents ask again after 0.4 to 1.2 s."""
KEPT_S = 60.0
"""Seconds for which a delivered reply can be asked for again; clients back off for up to 8 s."""
_MOST_KEPT = 32
"""Delivered replies of one session that can be asked for again."""

_NAMES = ("x-claude-code-agent-id", "thread-id", "Idempotency-Key")
"""Headers that differ between the branches of an agent: Claude Code's, Codex's, anybody's."""
_COUNT = "x-stainless-retry-count"
"""In this header the vendors' own clients count their attempts."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, as far as a request's headers tell."""

    name: str = ""
    """One branch of the agent, which never asks two things at once; empty where none is told."""
    again: bool = False
    """Whether the client says that it asked the same before."""


def read_asker(headers: Mapping[str, str]) -> Asker:
    """Read a request's headers."""
    names = [headers.get(name, "") for name in _NAMES]
    again = headers.get(_COUNT, "0").strip("0 ") != "" or bool(names[-1])
    return Asker("/".join(names).strip("/"), again)


class Twins:
    """The answers of one Session that another request may be given too."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, list[Answer]] = {}
        self._delivered: dict[Answer, tuple[Hashable, float]] = {}
        """Where each stands, and since when; oldest first."""

    def find(self, key: Hashable, asker: Asker) -> Answer | None:
        """Return the answer that this request asks for again; one that nobody awaits first."""
        known = [answer for answer in self._answers.get(key, ()) if answer.is_for(asker)]
        return min(known, key=lambda answer: answer.num_waiting, default=None)

    def add(self, key: Hashable, answer: Answer) -> None:
        """Let an answer be found."""
        self._answers.setdefault(key, []).append(answer)

    def deliver(self, key: Hashable, answer: Answer) -> None:
        """Note that an answer was delivered: from here on it is kept for a while only."""
        now = time.monotonic()
        self._delivered[answer] = (key, now)
        for old, place in list(self._old(now)):
            del self._delivered[old]
            self.remove(place, old)

    def remove(self, key: Hashable, answer: Answer) -> None:
        """Let an answer be found no more."""
        answers = self._answers.get(key, [])
        if answer in answers:
            answers.remove(answer)
        if not answers:
            self._answers.pop(key, None)

    def _old(self, now: float) -> Iterator[tuple[Answer, Hashable]]:
        num_over = len(self._delivered) - _MOST_KEPT
        for number, (answer, (key, since)) in enumerate(self._delivered.items()):
            if number >= num_over and since >= now - KEPT_S:
                return
            yield answer, key
