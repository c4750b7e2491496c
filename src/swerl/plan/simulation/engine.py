"""An engine in the simulation: prompts first and one at a time, then all replies together.

A prompt that is read stalls every reply (SGLang's default order). Replies advance at one rate,
which falls as more of them, and longer ones, are under way. A session's tokens stay in the cache
between its turns until others need the room, oldest first; what was put out is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Protocol, TypeAlias


class Signal:
    """Something that happens once. Who waits for it goes on at that moment."""

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Call back when it happens, or at once where it has."""
        if self.happened:
            call()
        else:
            self._waiting.append(call)

    def fire(self) -> None:
        """Let it happen."""
        if self.happened:
            return
        self.happened = True
        for call in self._waiting:
            call()


Process: TypeAlias = Generator["float | Signal", None, None]


class Clock:
    """Seconds since the simulation began, and what is still to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Call at a time, which is not in the past."""
        heappush(self._events, (max(time, self.now), next(self._order), call))

    def start(self, process: Process) -> Signal:
        """Begin a process; return the Signal of its end."""
        ended = Signal()
        self._go_on(process, ended)
        return ended

    def run(self, *, until: Signal | None = None) -> None:
        """Let everything happen, or what happens until a Signal."""
        while self._events and not (until and until.happened):
            self.now, _, call = heappop(self._events)
            call()

    def _go_on(self, process: Process, ended: Signal) -> None:
        for wish in process:
            if isinstance(wish, Signal):
                if wish.happened:
                    continue
                wish.then(lambda: self._go_on(process, ended))
                return
            self.at(self.now + wish, lambda: self._go_on(process, ended))
            return
        ended.fire()


class Slots:
    """Places that are taken in the order of asking."""

    def __init__(self, num: int) -> None:
        self._free = num
        self._waiting: deque[Signal] = deque()

    def take(self) -> Signal:
        """Return the Signal of having a place."""
        place = Signal()
        if self._free:
            self._free -= 1
            place.fire()
        else:
            self._waiting.append(place)
        return place

    def give(self) -> None:
        """Hand a place on."""
        if self._waiting:
            self._waiting.popleft().fire()
        else:
            self._free += 1


def all_of(signals: list[Signal]) -> Process:
    """Wait for every one of them."""
    yield from signals


class Speed(Protocol):
    """How fast an engine is."""

    def prompt_s(self, cached: int, tokens: int) -> float:
        """Return the seconds to read a prompt of `tokens`, the first `cached` of them known."""

    def round_s(self, replies: int, tokens: int) -> float:
        """Return the seconds of one token more for each of `replies`, with `tokens` in front."""


@dataclass(slots=True)
class Request:
    """One turn at an engine."""

    session: int
    prompt_tokens: int
    output_tokens: int
    done: Signal
    began: float
    """When it was asked."""
    number: int
    decoding: float = 0.0
    """When its reply began."""
    ended: float = 0.0

    @property
    def size(self) -> int:
        """Tokens in the cache at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class Usage:
    """What an engine did."""

    prompt_s: float = 0.0
    reply_s: float = 0.0
    """Seconds with at least one reply under way."""
    reply_rounds: float = 0.0
    sampled: int = 0
    """Tokens of replies."""
    read: int = 0
    """Tokens of prompts that were computed."""
    again: int = 0
    """Of these, tokens that had been put out of the cache."""


@dataclass(slots=True)
class SimulatedEngine:
    """One engine: requests in, a Signal out."""

    clock: Clock
    speed: Speed
    capacity: int
    """Tokens of its cache."""
    usage: Usage = field(default_factory=Usage)
    _queue: deque[Request] = field(default_factory=deque)
    _reading: Request | None = None
    _replies: list[tuple[float, int, Request]] = field(default_factory=list)
    _progress: float = 0.0
    """Tokens that a reply under way all the time would have got."""
    _since: float = 0.0
    _turn: int = 0
    _asked: int = 0
    _known: dict[int, int] = field(default_factory=dict)
    """Session -> tokens at the end of its last turn."""
    _held: int = 0
    """Tokens of requests at work."""
    _idle: dict[int, int] = field(default_factory=dict)
    """Session -> tokens in the cache between its turns, the longest unused first."""
    _idle_tokens: int = 0
    _paused: bool = False

    def ask(self, session: int, prompt_tokens: int, output_tokens: int) -> Request:
        """Begin a turn; its `done` fires at the reply's end."""
        request = Request(
            session, prompt_tokens, output_tokens, Signal(), self.clock.now, self._asked
        )
        self._asked += 1
        self._queue.append(request)
        self._next()
        return request

    def forget(self, session: int) -> None:
        """Free what a session that is over left."""
        self._known.pop(session, None)
        self._put_out(session)

    def _put_out(self, session: int) -> None:
        self._idle_tokens -= self._idle.pop(session, 0)

    def pause(self) -> None:
        """Stop for new weights: the cache of the old ones is worth nothing."""
        self._advance()
        self._paused = True
        self._idle.clear()
        self._idle_tokens = 0
        self._turn += 1

    def resume(self) -> None:
        """Go on."""
        self._advance()
        self._paused = False
        if self._reading is not None:
            self._read(self._reading)
        else:
            self._next()

    def _next(self) -> None:
        """Read the next prompt where one fits, else let the replies go on."""
        if self._paused or self._reading is not None:
            return
        self._advance()
        if self._queue and self._admit(self._queue[0]):
            self._read(self._queue.popleft())
        else:
            self._schedule_reply()

    def _admit(self, request: Request) -> bool:
        """Make room: idle sessions are put out. A request that is alone always fits."""
        free = self.capacity - self._held - (self._idle_tokens - self._idle.get(request.session, 0))
        for session in list(self._idle):
            if free >= request.size:
                break
            if session != request.session:
                free += self._idle[session]
                self._put_out(session)
        return free >= request.size or not self._replies

    def _read(self, request: Request) -> None:
        kept = self._idle.get(request.session, 0)
        self._put_out(request.session)
        cached = kept if kept <= request.prompt_tokens else 0
        seconds = self.speed.prompt_s(cached, request.prompt_tokens)
        if self._reading is not request:
            self._held += request.size
            self.usage.read += request.prompt_tokens - cached
            known = self._known.get(request.session, 0)
            self.usage.again += max(known - cached, 0) if known <= request.prompt_tokens else 0
        self._reading = request
        self._turn += 1
        self.usage.prompt_s += seconds
        self._call(seconds, self._answer)

    def _answer(self) -> None:
        request, self._reading = self._reading, None
        assert request is not None
        self._since = request.decoding = self.clock.now
        heappush(self._replies, (self._progress + request.output_tokens, request.number, request))
        self._next()

    def _advance(self) -> None:
        """Count what the replies got since the last event."""
        seconds, self._since = self.clock.now - self._since, self.clock.now
        if self._reading is not None or self._paused or not self._replies:
            return
        rounds = seconds / self._round_s()
        self._progress += rounds
        self.usage.reply_s += seconds
        self.usage.reply_rounds += rounds

    def _round_s(self) -> float:
        return self.speed.round_s(len(self._replies), self._held)

    def _schedule_reply(self) -> None:
        self._turn += 1
        if self._replies:
            left = max(self._replies[0][0] - self._progress, 0.0)
            self._call(left * self._round_s(), self._finish)

    def _finish(self) -> None:
        self._advance()
        self._progress, _, request = heappop(self._replies)
        self._held -= request.size
        self._idle[request.session] = request.size
        self._idle_tokens += request.size
        self._known[request.session] = request.size
        self.usage.sampled += request.output_tokens
        request.ended = self.clock.now
        self._next()
        request.done.fire()

    def _call(self, seconds: float, then: Callable[[], None]) -> None:
        """Call later, unless something else was decided before."""
        turn = self._turn
        self.clock.at(self.clock.now + seconds, lambda: then() if turn == self._turn else None)
