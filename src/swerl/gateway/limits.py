"""What one Session may ask of the gateway."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from swerl.core.errors import GatewayError, Refusal

_WINDOW_S = 60.0
_MOST_WAITING = 64
"""Requests of one session that wait for a place; each holds a whole conversation."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Caps of one Session."""

    max_turns: int = 200
    """Replies. Agents without a cap of their own would go on for ever."""
    max_sampled_tokens: int = 2_000_000
    """Tokens that the engine samples for the session, those of lost replies too."""
    max_context_tokens: int = 131_072
    """Prompt and reply together, in tokens."""
    max_body_bytes: int = 32 * 2**20
    """Bytes of one request: the cap of Anthropic's API."""
    max_concurrency: int = 8
    """Replies in the making at once; further requests wait. Sub-agents run side by side."""
    requests_per_minute: int = 600
    """Breaks loops: an agent that compacts in circles sent 900 requests in a minute."""
    model_call_s: float = 600.0
    """Seconds for one reply; a slower one is aborted."""


class Admission:
    """Lets requests of one Session in, within its limits."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._recent: deque[float] = deque()
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._num_turns = 0
        self._num_tokens = 0
        self._num_waiting = 0
        self.reading = asyncio.Semaphore(limits.max_concurrency)
        """Held while a body is read, so that bodies under way have a bound."""
        self.reached = ""
        """Name of the cap that refused a request; empty while none did, and once a prompt fits
        again after one that was over `max_context_tokens`."""

    def knock(self) -> None:
        """Count a request. Raises GatewayError where they come too fast."""
        now = time.monotonic()
        while self._recent and self._recent[0] < now - _WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._limits.requests_per_minute:
            message = f"{len(self._recent)} requests within a minute: the agent runs in a loop"
            raise self._refuse("requests_per_minute", message)
        self._recent.append(now)

    async def enter(self) -> bool:
        """Take a place for one reply, and say whether it had to be waited for.

        Raises GatewayError at a cap.
        """
        if self._num_turns >= self._limits.max_turns:
            raise self._refuse("max_turns", f"this session used up its {self._num_turns} turns")
        if self._num_tokens >= self._limits.max_sampled_tokens:
            message = f"this session used up its {self._limits.max_sampled_tokens} sampled tokens"
            raise self._refuse("max_sampled_tokens", message)
        if self._num_waiting >= _MOST_WAITING:
            raise GatewayError(
                f"{self._num_waiting} requests of this session wait already",
                refusal=Refusal.OVERLOADED,
            )
        self._num_turns += 1
        if not self._slots.locked():
            await self._slots.acquire()
            return False
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        except BaseException:
            self._num_turns -= 1
            raise
        finally:
            self._num_waiting -= 1
        return True

    def leave(self, *, answered: bool) -> None:
        """Give a place back; one that came to nothing costs no turn."""
        self._slots.release()
        self._num_turns -= int(not answered)

    def spend(self, num_tokens: int) -> None:
        """Count tokens that were sampled, whatever became of them."""
        self._num_tokens += num_tokens

    def _refuse(self, cap: str, message: str) -> GatewayError:
        self.reached = cap
        return GatewayError(message, refusal=Refusal.LIMIT)
