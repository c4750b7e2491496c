"""One process of the gateway: does what its controller orders, and ends with it.

`python -m swerl.gateway.process ORDERS REPORTS` is told the descriptors of its two sockets.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Coroutine
from functools import partial

from swerl.core import plugins
from swerl.core.contracts import EngineSetup
from swerl.core.errors import GatewayError, SwerlError
from swerl.gateway.answer import closed
from swerl.gateway.app import Gateway
from swerl.gateway.orders import (
    Attach,
    Begin,
    Broken,
    Close,
    Done,
    Open,
    Order,
    Ready,
    Report,
    Take,
    Told,
    as_told,
    frame,
    receive,
)
from swerl.gateway.sessions import ServedSession, TurnRecord


async def serve(orders: socket.socket, reports: socket.socket) -> None:
    """Serve until the controller is gone."""
    reports.setblocking(False)
    _, up = await asyncio.open_connection(sock=reports)
    first = receive(orders)
    if first is None or not isinstance(first.order, Begin):
        return
    try:
        await _serve(first.order, orders, up)
    except SwerlError as error:
        up.write(frame(Broken(SwerlError(str(error), hint=error.hint))))
        await up.drain()


async def _serve(begin: Begin, orders: socket.socket, up: asyncio.StreamWriter) -> None:
    setup = begin.setup
    family = plugins.family(setup.family, setup.model, setup.parser)
    engines = plugins.load("engines", setup.engine.type)
    options = engines.Options.model_validate(setup.engine.options)
    clerk = _Clerk(up)
    async with (
        engines.open(options, EngineSetup(family, setup.log_dir, setup.model)) as engine,
        Gateway(
            engine=engine,
            family=family,
            model_name=setup.model_name,
            host=None,
            history=setup.history,
            spool=setup.spool,
            bounds=setup.bounds,
            on_refused=clerk.refused,
            on_load=clerk.report,
            process=begin.process,
        ) as gateway,
    ):
        clerk.report(Ready(os.getpid()))
        await clerk.obey(orders, gateway)


class _Clerk:
    """Carries out orders and reports."""

    def __init__(self, up: asyncio.StreamWriter) -> None:
        self._up = up
        self._gateway: Gateway | None = None
        self._sessions: dict[str, ServedSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def obey(self, orders: socket.socket, gateway: Gateway) -> None:
        """Carry out orders until there is nobody left to give them."""
        self._gateway = gateway
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        orders.setblocking(False)
        loop.add_reader(orders, self._next, orders, ended)
        await ended
        loop.remove_reader(orders)

    def report(self, report: Report) -> None:
        """Tell the controller."""
        self._up.write(frame(report))

    def refused(self, session_id: str, _: Exception) -> None:
        """Tell how a session stands before its client hears of an error."""
        if session := self._sessions.get(session_id):
            self.report(Told(session_id, session.limit, as_told(session.failure)))

    def _next(self, orders: socket.socket, ended: asyncio.Future[None]) -> None:
        try:
            received = receive(orders)
        except BlockingIOError:
            return
        except OSError:
            received = None
        if received:
            self._carry_out(received.order, received.sock)
        elif not ended.done():
            ended.set_result(None)

    def _carry_out(self, order: Order, sock: socket.socket | None) -> None:
        assert self._gateway
        match order:
            case Open():
                self._open(order)
            case Attach(ticket, name):
                self._start(self._attach(ticket, name, sock))
            case Take(first) if sock:
                self._start(self._gateway.take(sock, first))
            case Close(ticket, name):
                self._start(self._close(ticket, name))

    def _open(self, order: Open) -> None:
        assert self._gateway
        self._sessions[order.session] = self._gateway.open(
            order.session,
            sampling=order.sampling,
            limits=order.limits,
            on_turn=partial(self._tell, order),
            key=order.key,
        )

    def _tell(self, opened: Open, record: TurnRecord) -> None:
        session = self._sessions[opened.session]
        words = record if opened.wants_turns else None
        told = Told(
            opened.session,
            session.limit,
            as_told(session.failure),
            len(record.turn.output_ids),
            words,
        )
        self.report(told)

    async def _attach(self, ticket: int, name: str, sock: socket.socket | None) -> None:
        session, error = self._sessions.get(name), None
        try:
            if sock is None:
                raise OSError("no descriptor is left for it")
            if session is None:
                sock.close()
                raise closed()
            await session.attach(sock)
        except SwerlError as caught:
            error = GatewayError(str(caught))
        except OSError as caught:
            error = GatewayError(f"the session's socket cannot be served: {caught}")
        self.report(Done(ticket, error=error))

    async def _close(self, ticket: int, name: str) -> None:
        session = self._sessions.get(name)
        if session is None:
            self.report(Done(ticket, error=GatewayError(f"session {name!r} was never opened")))
            return
        trajectory = await session.close()
        del self._sessions[name]
        self.report(Told(name, session.limit, as_told(session.failure)))
        self.report(Done(ticket, trajectory))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def main() -> None:
    """Serve on the sockets whose numbers are the arguments."""
    orders, reports = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    asyncio.run(serve(orders, reports))


if __name__ == "__main__":
    main()
