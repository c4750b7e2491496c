"""Admission: the limits of one Session, and of the whole gateway process.

A request of any Session holds a slot of the process from before its body is read until it is
answered. If no slot is free it waits unread: it costs its head and what the kernel buffers. Waiting
Sessions take turns, so a Session that floods the gateway delays only itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
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
_SIGNS_OF_VALUE = 6
"""Characters of a JSON value besides its text: quotes, a separator, white space, brackets."""
LONG_BYTES = 2**20
"""Bytes of a body from which it does so too."""
_MOST_THREADS = 2
"""More threads would delay the event loop, which waits up to 5 ms for each."""
_REST = 31.0
"""Seconds for which a Session starts no long work after each CPU second of it: its budget is 1/32
of a core. Most requests only add to a known history, and need none."""
_WINDOW_S = 60.0
_MOST_WAITING = 64
"""Requests of one Session that wait for a slot; each holds a whole conversation."""

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
        self._num_waiting = 0
        self.reading = asyncio.Semaphore(limits.max_concurrency)
        """Held while a body is read, so that the bodies in memory are bounded."""
        self.reached = ""
        """Name of the cap that refused a request, else empty. `max_context_tokens` is cleared
        when a later prompt fits."""

    def count_request(self) -> None:
        """Count a request. Raises GatewayError if requests come too fast."""
        now = time.monotonic()
        while self._recent and self._recent[0] < now - _WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._limits.requests_per_minute:
            message = f"{len(self._recent)} requests within a minute: the agent runs in a loop"
            raise self._refuse("requests_per_minute", message)
        self._recent.append(now)

    async def enter(self) -> bool:
        """Take a slot for one reply; return True after a wait. Raises GatewayError at a cap."""
        if self._num_turns >= self._limits.max_turns:
            raise self._refuse("max_turns", f"this session used up its {self._num_turns} turns")
        if self._num_tokens >= self._limits.max_sampled_tokens:
            message = f"this session used up its {self._limits.max_sampled_tokens} sampled tokens"
            raise self._refuse("max_sampled_tokens", message)
        if self._num_waiting >= _MOST_WAITING:
            raise GatewayError(
                f"{self._num_waiting} requests of this session are already waiting",
                refusal=Refusal.OVERLOADED,
            )
        # Counted before the wait: waiting requests together must not exceed the cap.
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
        """Free a slot; a request without an answer costs no turn."""
        self._slots.release()
        self._num_turns -= int(not answered)

    def spend(self, num_tokens: int) -> None:
        """Count sampled tokens, whether or not they reach a client."""
        self._num_tokens += num_tokens

    def _refuse(self, cap: str, message: str) -> GatewayError:
        self.reached = cap
        return GatewayError(message, refusal=Refusal.LIMIT)


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Caps of one gateway process."""

    most_active: int = 1024
    """Requests with a slot, most of which wait for the engine. One of 94,000 tokens takes 6 MB."""
    most_waiting: int = 1024
    """Requests that wait for a slot; each holds at most 64 KiB of its body."""
    wait_s: float = 10.0
    """Seconds to wait for a slot. Agents wait for minutes, and retry when refused."""


class GatewayAdmission:
    """The slots of one process, given to waiting Sessions in turn."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.num_active = 0
        self.num_waiting = 0
        self.num_refused = 0
        """Requests refused since the start because no slot was free."""
        self.in_loop = FairTurns(1)
        """Short work: one request in each iteration of the event loop."""
        self.in_thread = FairTurns(_MOST_THREADS)
        """Work that would block the event loop."""
        self._limits = limits
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting requests by Session; the next Session first."""

    @asynccontextmanager
    async def slot(self, session: str) -> AsyncIterator[None]:
        """Hold a slot for one request. Raises GatewayError if none is free in time."""
        # A new request must not overtake those that wait.
        if self.num_active < self._limits.most_active and not self._waiting:
            self.num_active += 1
        else:
            await self._wait(session)
        try:
            yield
        finally:
            self.num_active -= 1
            self._admit_next()

    async def _wait(self, session: str) -> None:
        self._make_room(session)
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, deque()).append(admitted)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await admitted
        except TimeoutError as error:
            self._give_up(session, admitted)
            raise self._refused() from error
        except BaseException:
            self._give_up(session, admitted)
            raise

    def _make_room(self, session: str) -> None:
        """Refuse the youngest request of the Session with the longest queue, or this one."""
        if self.num_waiting < self._limits.most_waiting:
            return
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=session)
        # This Session would have the longest queue itself.
        if len(self._waiting.get(longest, ())) <= len(self._waiting.get(session, ())) + 1:
            raise self._refused()
        youngest = self._waiting[longest][-1]
        self._remove(longest, youngest)
        youngest.set_exception(self._refused())

    def _give_up(self, session: str, admitted: asyncio.Future[None]) -> None:
        """Leave the queue; a slot that was granted at the same moment goes to the next request."""
        if admitted in self._waiting.get(session, ()):
            self._remove(session, admitted)
        elif admitted.done() and not admitted.cancelled() and admitted.exception() is None:
            self.num_active -= 1
            self._admit_next()

    def _admit_next(self) -> None:
        while self._waiting and self.num_active < self._limits.most_active:
            session, queue = next(iter(self._waiting.items()))
            admitted = queue[0]
            self._remove(session, admitted)
            if session in self._waiting:  # its next request comes after the other Sessions'
                self._waiting[session] = self._waiting.pop(session)
            # A request that was refused or cancelled meanwhile takes no slot.
            if not admitted.done():
                self.num_active += 1
                admitted.set_result(None)

    def _remove(self, session: str, admitted: asyncio.Future[None]) -> None:
        self._waiting[session].remove(admitted)
        self.num_waiting -= 1
        if not self._waiting[session]:
            del self._waiting[session]

    def _refused(self) -> GatewayError:
        self.num_refused += 1
        message = f"the gateway is serving {self.num_active} requests: retry in a moment"
        return GatewayError(message, refusal=Refusal.OVERLOADED)


def is_long(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Return True if making a prompt of these would block the event loop."""
    return len(messages) > LONG_MESSAGES or num_chars(messages, tools, most=LONG_CHARS) > LONG_CHARS


def num_chars(messages: Sequence[Message], tools: Sequence[Tool] = (), *, most: int) -> int:
    """Count the characters of messages and tools with their JSON; counting ends above `most`."""
    num, unread = 0, list[Any]()
    for message in messages:
        num += len(message.text) + len(message.thinking)
        unread += [call.arguments for call in message.tool_calls]
    for tool in tools:
        num += len(tool.description)
        unread.append(tool.parameters)
    while unread and num <= most:
        part = unread.pop()
        if isinstance(part, str):
            num += len(part)
        elif isinstance(part, Mapping):
            num += _SIGNS_OF_VALUE * len(part) + sum(map(len, part))
            unread += part.values()
        elif isinstance(part, list):
            num += _SIGNS_OF_VALUE * len(part)
            unread += part
    return num


class FairTurns:
    """Gives turns to Sessions; of those that wait, the one that used least comes first.

    Start-time fair queueing (Goyal et al. 1996): a new Session starts level with the one served
    last, so it neither waits for the past of others nor saves turns up.
    """

    def __init__(self, most: int) -> None:
        """Let at most `most` requests have a turn at once."""
        self._num_free = most
        self._level = 0.0
        self._used: dict[str, float] = {}
        """What each Session used since requests began to wait."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._rests: dict[str, float] = {}
        """Time until which a Session has used up its budget."""
        self._at_work = WeakValueDictionary[str, asyncio.Lock]()

    async def wait(self, session: str) -> None:
        """Return when it is this Session's turn; the caller must `leave`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(session, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # Granted at the same moment: the turn goes to the next request.
            if turn.done() and not turn.cancelled():
                self.leave(session, 0.0)
            raise

    def leave(self, session: str, used: float) -> None:
        """End a turn that used this much, and begin the next one."""
        self._used[session] = max(self._used.get(session, 0.0), self._level) + used
        self._num_free += 1
        while self._waiting:
            first = min(self._waiting, key=lambda name: self._used.get(name, self._level))
            turn = self._waiting[first].popleft()
            if not self._waiting[first]:
                del self._waiting[first]
            if not turn.done():
                self._level = max(self._level, self._used.get(first, 0.0))
                self._num_free -= 1
                turn.set_result(None)
                return
        # Nobody is delayed, so nothing has to be shared.
        self._used.clear()
        self._level = 0.0

    async def wait_in_loop(self, session: str) -> None:
        """Return in an iteration of the event loop in which no other request works.

        The turn ends with the iteration, and uses its CPU time.
        """
        await self.wait(session)
        began_s = time.thread_time()
        asyncio.get_running_loop().call_soon(
            lambda: self.leave(session, time.thread_time() - began_s)
        )

    async def run(self, session: str, work: Callable[[], T]) -> T:
        """Return `work()`, called in a thread, within the Session's budget of CPU time.

        A Session has one at a time. The turn lasts until the work has ended, even if the caller is
        cancelled: a client that leaves must not start more threads.
        """
        lock = self._at_work.setdefault(session, asyncio.Lock())
        await lock.acquire()
        try:
            await asyncio.sleep(max(0.0, self._rests.get(session, 0.0) - time.monotonic()))
            await self.wait(session)
        except BaseException:
            lock.release()
            raise
        used_s = 0.0

        def measured() -> T:
            nonlocal used_s
            began_s = time.thread_time()
            try:
                return work()
            finally:
                used_s = time.thread_time() - began_s

        working = asyncio.get_running_loop().run_in_executor(None, measured)

        def end(done: asyncio.Future[T]) -> None:
            self.leave(session, used_s)
            lock.release()
            now_s = time.monotonic()
            self._rests = {name: end_s for name, end_s in self._rests.items() if end_s > now_s}
            self._rests[session] = now_s + _REST * used_s
            if not done.cancelled():
                done.exception()  # the caller may be gone

        working.add_done_callback(end)
        try:
            return await asyncio.shield(working)
        finally:
            # An error's traceback holds this frame: with the future, it would hold itself, and
            # the request's body with it.
            del working
