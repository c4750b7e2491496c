"""The simulated clock and a simulated engine: prompts one at a time, then all replies together.

A prompt stalls every reply, as in SGLang's default order. Replies advance at one common rate, which
falls as they become more and longer. Between turns a session's tokens stay in the cache until
others need the room; the oldest are evicted first and recomputed later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol, TypeAlias


class Signal:
    """A one-time event; its waiters are called when it happens."""

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Call when it happens, or at once if it has happened."""
        if self.happened:
            call()
        else:
            self._waiting.append(call)

    def fire(self) -> None:
        if self.happened:
            return
        self.happened = True
        for call in self._waiting:
            call()


Process: TypeAlias = Generator["float | Signal", None, None]


class SimulatedClock:
    """Simulated time and pending events.

    A process is a generator that yields seconds to sleep or a Signal to wait for. Simultaneous
    events happen in the order of their scheduling, so a simulation repeats exactly.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Schedule a call; past times mean now."""
        heappush(self._events, (max(time, self.now), next(self._order), call))

    def start(self, process: Process) -> Signal:
        """Start a process; return the Signal of its end."""
        ended = Signal()
        self._go_on(process, ended)
        return ended

    def run(self, *, until: Signal | None = None) -> None:
        """Run all events, or those until a Signal."""
        while self._events and not (until and until.happened):
            self.now, _, call = heappop(self._events)
            call()

    def _go_on(self, process: Process, ended: Signal) -> None:
        for waited in process:
            if isinstance(waited, Signal):
                if waited.happened:
                    continue
                waited.then(lambda: self._go_on(process, ended))
                return
            self.at(self.now + waited, lambda: self._go_on(process, ended))
            return
        ended.fire()


@dataclass(slots=True, eq=False)
class _CoreJob:
    cores: float
    then: Callable[[], None]
    active: bool = True


@dataclass(slots=True)
class SimulatedCores:
    """CPU cores that sandboxes, engine and trainer share; too many jobs slow down alike."""

    clock: SimulatedClock
    num: float = inf
    """Infinite: no job slows another down."""
    _used: float = 0.0
    _work: float = 0.0
    """Seconds of work that a job would have got until `_since`."""
    _since: float = 0.0
    _jobs: list[tuple[float, int, _CoreJob]] = field(default_factory=list)
    """Each with its end in seconds of work."""
    _numbers: Iterator[int] = field(default_factory=count)
    _turn: int = 0

    @property
    def now(self) -> float:
        """Seconds of work that a job would have got since the start."""
        return self._work + (self.clock.now - self._since) / self._slowness

    @property
    def _slowness(self) -> float:
        return max(1.0, self._used / self.num)

    def start(self, seconds: float, cores: float, then: Callable[[], None]) -> Callable[[], None]:
        """Begin a job that takes `seconds` if it is alone; return the function that stops it."""
        job = _CoreJob(cores, then)
        if self.num == inf:
            self.clock.at(self.clock.now + seconds, lambda: then() if job.active else None)
        else:
            heappush(self._jobs, (self.now + seconds, next(self._numbers), job))
            self._use(cores)

        def stop() -> None:
            if job.active:
                job.active = False
                if self.num < inf:
                    self._use(-cores)

        return stop

    def work(self, seconds: float, cores: float) -> Process:
        """Run a job to its end."""
        if self.num == inf or not seconds:
            yield seconds
            return
        done = Signal()
        self.start(seconds, cores, done.fire)
        yield done

    def _use(self, more: float) -> None:
        """Change the cores in use, and with them the time of the next end."""
        self._work, self._since = self.now, self.clock.now
        self._used = max(self._used + more, 0.0)
        self._turn += 1
        while self._jobs and not self._jobs[0][2].active:
            heappop(self._jobs)
        if self._jobs:
            turn, left = self._turn, max(self._jobs[0][0] - self._work, 0.0)
            end = self.clock.now + left * self._slowness
            self.clock.at(end, lambda: self._end() if turn == self._turn else None)

    def _end(self) -> None:
        _, _, job = heappop(self._jobs)
        job.active = False
        self._use(-job.cores)
        job.then()


class SimulatedSlots:
    """SimulatedSlots, granted in the order of requests."""

    def __init__(self, num: int) -> None:
        self._free = num
        self._waiting: deque[Signal] = deque()

    def take(self) -> Signal:
        """Return the Signal of being granted a slot."""
        granted = Signal()
        if self._free:
            self._free -= 1
            granted.fire()
        else:
            self._waiting.append(granted)
        return granted

    def give(self) -> None:
        if self._waiting:
            self._waiting.popleft().fire()
        else:
            self._free += 1


def all_of(signals: list[Signal]) -> Process:
    """Wait for all Signals."""
    yield from signals


class Speed(Protocol):
    def prompt_s(self, cached: int, tokens: int) -> float:
        """Return the seconds to read a prompt whose first `cached` of `tokens` are known."""

    def round_s(self, replies: int, tokens: int) -> float:
        """Return the seconds of one more token for each of `replies`, after `tokens` in total."""


@dataclass(slots=True)
class SimulatedRequest:
    session: int
    prompt_tokens: int
    output_tokens: int
    done: Signal
    began: float
    """Time of the request."""
    number: int
    decoding: float = 0.0
    """Time at which its reply began."""
    ended: float = 0.0

    @property
    def size(self) -> int:
        """Tokens in the cache when it ends."""
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class SimulatedUsage:
    prompt_s: float = 0.0
    reply_s: float = 0.0
    """Seconds with at least one running reply."""
    reply_rounds: float = 0.0
    sampled: int = 0
    """Tokens of replies."""
    read: int = 0
    """Tokens of prompts that were computed."""
    again: int = 0
    """The part of these that had been evicted from the cache."""


@dataclass(slots=True)
class SimulatedEngine:
    """One engine; a request returns a Signal of its end."""

    clock: SimulatedClock
    speed: Speed
    capacity: int
    """Tokens of its cache."""
    cores: SimulatedCores
    num_cores: float = 0.0
    """Of these, the cores that it needs while it reads or replies."""
    usage: SimulatedUsage = field(default_factory=SimulatedUsage)
    _queue: deque[SimulatedRequest] = field(default_factory=deque)
    _reading: SimulatedRequest | None = None
    _replies: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    _progress: float = 0.0
    """Tokens of a reply that had run since the start."""
    _since: float = 0.0
    _stop: Callable[[], None] = lambda: None
    """Stops the prompt or the replies under way."""
    _asked: int = 0
    _known: dict[int, int] = field(default_factory=dict)
    """Session → tokens at the end of its last turn."""
    _held: int = 0
    """Tokens of running requests."""
    _idle: dict[int, int] = field(default_factory=dict)
    """Session → tokens in the cache between its turns, least recently used first."""
    _idle_tokens: int = 0
    _paused: bool = False

    def ask(self, session: int, prompt_tokens: int, output_tokens: int) -> SimulatedRequest:
        """Start a turn; `done` fires when the reply ends."""
        request = SimulatedRequest(
            session, prompt_tokens, output_tokens, Signal(), self.clock.now, self._asked
        )
        self._asked += 1
        self._queue.append(request)
        self._next()
        return request

    def forget(self, session: int) -> None:
        """Free the cache of a finished session."""
        self._known.pop(session, None)
        self._evict(session)

    def _evict(self, session: int) -> None:
        self._idle_tokens -= self._idle.pop(session, 0)

    def pause(self) -> None:
        """Stop for new weights, which invalidate the cache."""
        self._advance()
        self._paused = True
        self._idle.clear()
        self._idle_tokens = 0
        self._stop()

    def resume(self) -> None:
        self._advance()
        self._paused = False
        if self._reading is not None:
            self._read(self._reading)
        else:
            self._next()

    def _next(self) -> None:
        """Read the next prompt if it fits, else continue the replies."""
        if self._paused or self._reading is not None:
            return
        self._advance()
        if self._queue and self._admit(self._queue[0]):
            self._read(self._queue.popleft())
        else:
            self._schedule_reply()

    def _admit(self, request: SimulatedRequest) -> bool:
        """Evict idle sessions for a request; one that runs alone always fits."""
        free = self.capacity - self._held - (self._idle_tokens - self._idle.get(request.session, 0))
        for session in list(self._idle):
            if free >= request.size:
                break
            if session != request.session:
                free += self._idle[session]
                self._evict(session)
        return free >= request.size or not self._replies

    def _read(self, request: SimulatedRequest) -> None:
        kept = self._idle.get(request.session, 0)
        self._evict(request.session)
        cached = kept if kept <= request.prompt_tokens else 0
        seconds = self.speed.prompt_s(cached, request.prompt_tokens)
        if self._reading is not request:
            self._held += request.size
            self.usage.read += request.prompt_tokens - cached
            known = self._known.get(request.session, 0)
            self.usage.again += max(known - cached, 0) if known <= request.prompt_tokens else 0
        self._reading = request
        self.usage.prompt_s += seconds
        self._call(seconds, self._answer)

    def _answer(self) -> None:
        request, self._reading = self._reading, None
        assert request is not None
        self._since, request.decoding = self.cores.now, self.clock.now
        heappush(self._replies, (self._progress + request.output_tokens, request.number, request))
        self._next()

    def _advance(self) -> None:
        """Advance the replies to the present."""
        seconds, self._since = self.cores.now - self._since, self.cores.now
        if self._reading is not None or self._paused or not self._replies:
            return
        rounds = seconds / self._round_s()
        self._progress += rounds
        self.usage.reply_s += seconds
        self.usage.reply_rounds += rounds

    def _round_s(self) -> float:
        return self.speed.round_s(len(self._replies), self._held)

    def _schedule_reply(self) -> None:
        self._stop()
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
        """Schedule a call that a later decision cancels."""
        self._stop()
        self._stop = self.cores.start(seconds, self.num_cores, then)
