"""Admission: the limits of one Session.

A Session has a bounded share of the process: requests at once, requests a minute, bodies in memory,
and one piece of long work. Further requests wait unread or are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

from swerl.core.chat import Message, Tool
from swerl.core.errors import GatewayError, Refusal

MOST_MESSAGES = 10_000
"""Messages of one request, each of which costs up to 0.1 ms; an agent compacts after hundreds."""
MOST_TOOLS = 1_000
"""Tools of one request; OpenAI's API accepts 128."""
MOST_VALUES = 100_000
"""JSON values of one request, under 10 MiB in memory. A prompt has fewer values than tokens."""
LONG_MESSAGES = 300
"""Messages from which work on a request leaves the event loop; fewer take under 20 ms."""
LONG_VALUES = 10_000
"""JSON values from which it does so too: they may be the blocks of one message."""
LONG_CHARS = 20_000
"""Characters of new messages from which their prompt is made in a thread."""
LONG_REPLY = 8192
"""Tokens of a reply above which it is read in a thread; fewer take under 10 ms."""
LONG_BYTES = 2**20
"""Bytes of a body from which it does so too."""
_MOST_THREADS = 2
"""More threads would delay the event loop, which waits up to 5 ms for each."""
_WINDOW_S = 60.0
_MOST_REQUESTS = 64
"""Requests of one Session at the same time; each may hold a whole conversation."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Caps of one Session."""

    max_turns: int = 200
    """Replies. An agent without a cap of its own would never stop."""
    max_sampled_tokens: int = 2_000_000
    """Tokens that the engine samples for the Session, tokens of lost replies included."""
    max_context_tokens: int = 131_072
    """Prompt and reply together, in tokens."""
    max_body_bytes: int = 32 * 2**20
    """Bytes of one request: the cap of Anthropic's API."""
    max_concurrency: int = 8
    """Replies sampled at the same time; further requests wait. Sub-agents run in parallel."""
    requests_per_minute: int = 600
    """Stops loops: an agent that compacts in circles sent 900 requests in a minute."""
    model_call_s: float = 600.0
    """Seconds for one reply; a slower one is aborted."""


class SessionAdmission:
    """Admits the requests of one Session, within its limits."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._recent: deque[float] = deque()
        self._slots = asyncio.Semaphore(limits.max_concurrency)
        self._num_turns = 0
        self._num_tokens = 0
        self._num_requests = 0
        self.reading = asyncio.Semaphore(limits.max_concurrency)
        """Held while a body is read, so that the bodies in memory are bounded."""
        self.is_used = False
        """True once a request has asked for a reply."""
        self.reached = ""
        """Name of the cap that refused a request, or empty. `max_context_tokens` is cleared
        when a later prompt fits."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it lasts. Raises GatewayError if they are too fast or too many."""
        now = time.monotonic()
        while self._recent and self._recent[0] < now - _WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._limits.requests_per_minute:
            message = f"{len(self._recent)} requests within a minute: the agent runs in a loop"
            raise self._refuse("requests_per_minute", message)
        if self._num_requests >= _MOST_REQUESTS:
            message = f"{self._num_requests} requests of this session are already waiting"
            raise GatewayError(message, refusal=Refusal.OVERLOADED)
        self._recent.append(now)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    async def enter(self) -> bool:
        """Take a slot for one reply; return True after a wait. Raises GatewayError at a cap."""
        self.is_used = True
        if self._num_turns >= self._limits.max_turns:
            raise self._refuse("max_turns", f"this session used up its {self._num_turns} turns")
        if self._num_tokens >= self._limits.max_sampled_tokens:
            message = f"this session used up its {self._limits.max_sampled_tokens} sampled tokens"
            raise self._refuse("max_sampled_tokens", message)
        # Counted before the wait: waiting requests together must not exceed the cap.
        self._num_turns += 1
        if not self._slots.locked():
            await self._slots.acquire()
            return False
        try:
            await self._slots.acquire()
        except BaseException:
            self._num_turns -= 1
            raise
        return True

    def leave(self, *, answered: bool) -> None:
        """Free a slot; a request without an answer costs no turn."""
        self._slots.release()
        self._num_turns -= int(not answered)

    def spend(self, num_tokens: int) -> None:
        """Count sampled tokens, whether or not they reach a client."""
        self._num_tokens += num_tokens

    def _refuse(self, cap: str, message: str) -> GatewayError:
        self.reached = cap
        return GatewayError(message, refusal=Refusal.LIMIT)


class LongWork:
    """Work that would block the event loop: in threads, one piece of a Session at a time."""

    def __init__(self) -> None:
        self._threads = asyncio.Semaphore(_MOST_THREADS)
        self._sessions = WeakValueDictionary[str, asyncio.Lock]()

    async def run(self, session: str, work: Callable[[], T]) -> T:
        """Return `work()`, called in a thread.

        A cancelled call keeps its thread's place until the work has ended: a client that leaves
        must not start more threads.
        """
        task = asyncio.create_task(self._run(session, work))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _run(self, session: str, work: Callable[[], T]) -> T:
        lock = self._sessions.setdefault(session, asyncio.Lock())
        async with lock, self._threads:
            return await asyncio.to_thread(work)


def is_long(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Return True if encoding these would block the event loop."""
    chars = num_chars(messages) + sum(len(tool.description) for tool in tools)
    return len(messages) > LONG_MESSAGES or chars > LONG_CHARS


def num_chars(messages: Sequence[Message]) -> int:
    """Count the characters of texts, thinking and text arguments of calls."""
    num = sum(len(message.text) + len(message.thinking) for message in messages)
    calls = (call for message in messages for call in message.tool_calls)
    values = (value for call in calls for value in call.arguments.values())
    return num + sum(len(value) for value in values if isinstance(value, str))
