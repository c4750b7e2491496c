"""What the controller and a process of the gateway say to each other, and how it crosses.

Orders go down a socket that keeps messages apart and in order, so that one may carry a descriptor.
Reports come up a stream, because a Trajectory is large. Both are pickled: the two ends are one
program of one user, and nobody else holds the sockets.
"""

from __future__ import annotations

import pickle
import socket
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from swerl.core.contracts import EngineAddress, ParserChoice
from swerl.core.errors import BudgetError, EngineError, EngineLostError, SwerlError
from swerl.core.events import GatewayLoad
from swerl.core.experts import ExpertSpool
from swerl.core.turn import Sampling
from swerl.gateway.intake import Bounds
from swerl.gateway.limits import SessionLimits
from swerl.gateway.sessions import TurnRecord
from swerl.gateway.speakers import HistoryPolicy

MOST_FIRST_BYTES = 65536
"""Bytes of a connection that travel with it: no head of a request is longer."""
_MOST_ORDER_BYTES = 2 * MOST_FIRST_BYTES
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a process needs to begin."""

    engine: EngineAddress
    family: str
    """Name of the model family."""
    model: Path | None
    """Folder of the model, for its tokenizer."""
    model_name: str
    history: HistoryPolicy
    log_dir: Path
    bounds: Bounds = field(default_factory=Bounds)
    parser: ParserChoice | None = None
    """Who reads the replies where the family does not."""
    spool: ExpertSpool | None = None
    """Where recorded experts go; they stay in memory where there is none."""


@dataclass(frozen=True, slots=True)
class Begin:
    """The first order."""

    process: int
    setup: WorkerSetup


@dataclass(frozen=True, slots=True)
class Open:
    """Open a session."""

    session: str
    key: str
    sampling: Sampling
    limits: SessionLimits
    wants_turns: bool
    """Whether each Turn is to be told with its words."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Serve a session on the listening socket that comes with this."""

    ticket: int
    session: str


@dataclass(frozen=True, slots=True)
class Take:
    """Serve the connection that comes with this."""

    first: bytes
    """What was read of it already."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close a session and return its Trajectory."""

    ticket: int
    session: str


Order: TypeAlias = Begin | Open | Attach | Take | Close


@dataclass(frozen=True, slots=True)
class Ready:
    """The process serves."""

    pid: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The process cannot begin, and ends."""

    error: SwerlError


@dataclass(frozen=True, slots=True)
class Told:
    """A request of a session ended: with a Turn, or with an error."""

    session: str
    limit: str
    failure: SwerlError | None
    num_tokens: int = 0
    """Sampled tokens of the Turn."""
    record: TurnRecord | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What came of the order with this ticket."""

    ticket: int
    value: Any = None
    error: SwerlError | None = None


Report: TypeAlias = Ready | Broken | Told | Done | GatewayLoad


@dataclass(frozen=True, slots=True)
class Received:
    """An order, and the socket that came with it."""

    order: Order
    sock: socket.socket | None


def receive(orders: socket.socket) -> Received | None:
    """Return the next order; None where the other end is gone. Raises BlockingIOError."""
    size = array("i").itemsize
    data, ancillary, _, _ = orders.recvmsg(
        _MOST_ORDER_BYTES, socket.CMSG_SPACE(size), socket.MSG_CMSG_CLOEXEC
    )
    if not data:
        return None
    sock = None
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(payload) >= size:
            sock = socket.socket(fileno=array("i", payload[:size])[0])
    return Received(pickle.loads(data), sock)


def pack(order: Order) -> bytes:
    """Return an order as one message."""
    return pickle.dumps(order, protocol=5)


def frame(report: Report) -> bytes:
    """Return a report as it goes over the stream."""
    data = pickle.dumps(report, protocol=5)
    return len(data).to_bytes(_LENGTH_BYTES) + data


class Unframer:
    """Puts the pieces of a stream together to reports."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[Report]:
        """Yield the reports that are whole."""
        self._pending += data
        while len(self._pending) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._pending[:_LENGTH_BYTES])
            if len(self._pending) < end:
                return
            report = pickle.loads(memoryview(self._pending)[_LENGTH_BYTES:end])
            del self._pending[:end]
            yield report


def as_told(error: SwerlError | None) -> SwerlError | None:
    """Return a failure as a plain one of ours: a plug-in's own class may not travel."""
    if error is None:
        return None
    kinds: tuple[type[SwerlError], ...] = (BudgetError, EngineLostError, EngineError, SwerlError)
    kind = next(kind for kind in kinds if isinstance(error, kind))
    return kind(str(error), hint=error.hint, retryable=error.retryable)
