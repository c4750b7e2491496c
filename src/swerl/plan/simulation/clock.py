"""A clock of discrete events: processes that wait for seconds, for each other, or for a place.

A process is a generator. It yields seconds to sleep, or a Signal to wait for. Events at the same
time happen in the order in which they were asked for, so that a simulation repeats exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias


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
