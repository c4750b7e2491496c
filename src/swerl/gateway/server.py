"""Gateway: the HTTP service that answers every dialect from one engine.

The main port serves all open Sessions by key. A socket attached to a Session serves only that one.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from secrets import token_urlsafe
from types import TracebackType
from typing import Self, TypeAlias

from swerl.core.contracts import ChatEngine, Endpoint, Engine, Family
from swerl.core.errors import GatewayError
from swerl.core.events import GatewayLoad, ignore
from swerl.core.experts import ExpertSpool
from swerl.core.turn import Sampling
from swerl.gateway.conversation import Conversation, TurnRecord
from swerl.gateway.limits import LongWork, SessionLimits
from swerl.gateway.prompting import HistoryPolicy, prompter
from swerl.gateway.router import OnRefused, Router, Server
from swerl.gateway.sessions import Serving, Session

HOST = "127.0.0.1"
LAG_SAMPLE_S = 0.1
"""Seconds between two samples of event-loop lag: shorter stalls do no harm."""
LOAD_REPORT_S = 10.0
"""Seconds between two GatewayLoad events."""
_SWITCH_S = 0.0005
"""Seconds that a thread at long work may delay the event loop at each of its turns; with Python's
5 ms one Session could halve the speed of all."""
_MOST_CONNECTIONS = 256
"""Connections to a Session's own socket: an agent and its sub-agents hold a few."""
_MOST_CONNECTIONS_OF_ALL = 8192
"""Connections to the main port: a few for each of a thousand Sessions."""
_BACKLOG = 1024
"""Connections that may wait in the kernel, when a thousand agents start at once."""
OnLoad: TypeAlias = Callable[[GatewayLoad], None]


class Gateway:
    """Answers agents from an engine and records exact tokens by Session."""

    def __init__(
        self,
        *,
        engine: Engine | ChatEngine,
        family: Family,
        model_name: str = "swerl",
        host: str = HOST,
        port: int = 0,
        history: HistoryPolicy = HistoryPolicy.EXACT,
        on_refused: OnRefused | None = None,
        on_load: OnLoad = ignore,
        spool: ExpertSpool | None = None,
    ) -> None:
        """Prepare a gateway; it listens on `host` and `port` between enter and exit.

        `on_refused` is called for each request that ends in an error, `on_load` every ten seconds
        while Sessions are open. Routed experts go to `spool`, or stay in memory without one.
        """
        self.url = ""
        self._engine = engine
        self._family = family
        self._model_name = model_name
        self._host = host
        self._port = port
        self._history = history
        self._spool = spool
        self._on_load = on_load
        self._long_work = LongWork()
        self._router = Router(model_name, on_refused)
        self._sessions: dict[str, Session] = {}
        self._serving: Serving | None = None
        self._load_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        sys.setswitchinterval(_SWITCH_S)
        listening = _listen(self._host, self._port)
        self.url = _url_of(self._host, listening)
        self._serving = await self._serve(None, listening)
        self._load_task = asyncio.create_task(self._report_load())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Sessions close first, so that no reply is pending when the sockets close.
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        if self._load_task:
            self._load_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._load_task
        if self._serving:
            await self._serving.end()

    def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        limits: SessionLimits,
        on_turn: Callable[[TurnRecord], None] | None = None,
        key: str | None = None,
    ) -> Session:
        """Open a Session; the gateway serves no others.

        It answers to `key`, which an earlier Session then loses, or to a fresh key. Raises
        GatewayError if a Session of this id is already open.
        """
        if session_id in self._sessions:
            raise GatewayError(
                f"session {session_id!r} is already open", hint="close it, or choose another id"
            )
        conversation = Conversation(
            session_id,
            prompter(self._engine, self._family, session_id, self._history, self._spool),
            sampling=sampling,
            limits=limits,
            on_turn=on_turn,
            long_work=self._long_work,
        )
        session = Session(
            session_id,
            conversation,
            endpoint=Endpoint(self.url, key or f"sk-swerl-{token_urlsafe(24)}", self._model_name),
            serve=self._serve,
            on_close=self._forget,
        )
        # An earlier Session with this key receives no further requests.
        self._router.sessions[session.key] = session
        self._sessions[session_id] = session
        return session

    def _forget(self, session: Session) -> None:
        # A later Session may have taken over the key.
        if self._router.sessions.get(session.key) is session:
            del self._router.sessions[session.key]
        del self._sessions[session.id]

    async def _serve(self, session: Session | None, sock: socket.socket) -> Serving:
        """Serve all Sessions, or only one, on a listening socket."""
        most = _MOST_CONNECTIONS if session else _MOST_CONNECTIONS_OF_ALL
        handler = partial(self._router.handle, session)
        server = Server(handler, self._router.on_break, most=most)
        loop = asyncio.get_running_loop()
        return Serving(await loop.create_server(server, sock=sock, backlog=_BACKLOG), server)

    async def _report_load(self) -> None:
        """Sample event-loop lag, and report it every ten seconds."""
        reported_s = expected_s = time.monotonic()
        lag_s = 0.0
        while True:
            await asyncio.sleep(LAG_SAMPLE_S)
            now_s = time.monotonic()
            # The sleep ends late by the time for which the loop was blocked.
            lag_s = max(lag_s, now_s - expected_s - LAG_SAMPLE_S)
            expected_s = now_s
            if now_s - reported_s < LOAD_REPORT_S:
                continue
            reported_s = now_s
            if self._sessions:
                self._on_load(GatewayLoad(round(lag_s, 4), len(self._sessions)))
            lag_s = 0.0


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises GatewayError if the address is not available."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # which repeats the address
        message = f"cannot listen on {host}:{port}: {reason}"
        hint = "set the port to 0 to get a free one, or stop the process that uses it"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            hint = "name an address of this machine, such as 127.0.0.1"
        raise GatewayError(message, hint=hint) from error


def _url_of(host: str, listening: socket.socket) -> str:
    """Return the URL at which a client on this machine reaches the socket."""
    name = HOST if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}"
