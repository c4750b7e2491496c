"""HTTP: connections, request bodies, routing to a dialect, and answers.

Every failure leaves in its vendor's format. A connection without a request has no cost but its
socket, even if it sends one byte a minute. If there are too many, a new one is closed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import orjson
from aiohttp import web

from swerl.core import plugins
from swerl.core.chat import ChatRequest, Json
from swerl.core.contracts import Dialect, WireReply
from swerl.core.errors import GatewayError, Refusal, SwerlError
from swerl.gateway.bodies import (
    count_values,
    may_be_large,
    num_items,
    read_body,
    read_object,
    read_plain,
    too_large,
)
from swerl.gateway.conversation import read_requester
from swerl.gateway.limits import (
    LONG_MESSAGES,
    LONG_VALUES,
    MOST_MESSAGES,
    MOST_TOOLS,
)
from swerl.gateway.sessions import Session

PING_S = 5.0
"""Seconds between two signs to a streaming client that its answer is pending."""

_MODELS = "/v1/models"
_HEALTH_CHECKS = frozenset({"", "/api/hello", "/healthz"})
"""Paths at which agents and people check that a server is up."""
_METHODS: Mapping[str, str] = {"chat": "POST", "count_tokens": "POST", "models": "GET"}

OnRefused: TypeAlias = Callable[[str, Exception], None]
"""Called for each request that ends in an error, with its Session's id; empty if it has none."""


class Router:
    """Answers requests for open Sessions."""

    def __init__(self, model_name: str, on_refused: OnRefused | None = None) -> None:
        self.sessions: dict[str, Session] = {}
        """Open Sessions by key."""
        self.on_break: dict[web.RequestHandler, Callable[[], None]] = {}
        """Callback by connection, if it breaks after its last answer."""
        self._model_name = model_name
        self._on_refused = on_refused
        self._routes = _Routes()

    async def handle(self, alone: Session | None, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request to one Session only, or to the Session of its key."""
        path = request.path.rstrip("/")
        if request.method == "HEAD" or (request.method == "GET" and path in _HEALTH_CHECKS):
            return web.json_response({"ok": True})
        route = self._routes.find(path)
        dialect = self._routes.dialect(path)
        stream = EventStream(request)
        session = alone
        try:
            if route is None or request.method != _METHODS[route.operation]:
                raise GatewayError(
                    f"nothing is served at {request.method} {path or '/'}",
                    refusal=Refusal.NOT_FOUND,
                )
            session = session or self._session(request.headers, dialect)
            return await self._serve(request, stream, route, session)
        except Exception as error:  # noqa: BLE001  # the boundary: a client always gets an answer
            if isinstance(error, ConnectionError) and not isinstance(error, SwerlError):
                return web.Response(status=499)  # the client is gone
            if self._on_refused:
                self._on_refused(session.id if session else "", error)
            return await _fail(request, stream, dialect, error)

    def _session(self, headers: Mapping[str, str], dialect: Dialect) -> Session:
        key = dialect.session_key(headers)
        session = self.sessions.get(key) if key else None
        if session is None:
            raise GatewayError(
                "no open session has this API key" if key else "no API key was sent",
                refusal=Refusal.AUTHENTICATION,
            )
        return session

    async def _serve(
        self, request: web.BaseRequest, stream: EventStream, route: _Route, session: Session
    ) -> web.StreamResponse:
        if route.operation == "models":
            name = request.path.rstrip("/").partition(_MODELS + "/")[2]
            return await send_json(request, _model(name) if name else _models(self._model_name))
        with session.conversation.admission.request():
            return await self._answer(request, stream, route, session)

    async def _answer(
        self,
        request: web.BaseRequest,
        stream: EventStream,
        route: _Route,
        session: Session,
    ) -> web.StreamResponse:
        conversation = session.conversation
        most = conversation.limits.max_body_bytes
        encoding = request.headers.get("Content-Encoding", "")
        async with conversation.admission.reading:
            body = await read_body(request, most)
        chat_request = await self._read(session, route.dialect, body, encoding, most)
        # A body may have 32 MiB, and the engine may sample for minutes.
        del body
        if route.operation == "count_tokens":
            # Both vendors' clients can read this object.
            num_tokens = await conversation.count(chat_request)
            count: Json = {"object": "response.input_tokens", "input_tokens": num_tokens}
            return await send_json(request, count)
        async with conversation.answer(chat_request, read_requester(request.headers)) as answer:
            # Pings prevent that a streaming client gives up.
            while chat_request.stream and not await answer.ready(PING_S):
                await stream.ping()
            reply = await answer.reply()
            if chat_request.stream:
                response = await stream.finish(route.dialect.events(reply))
            else:
                response = await send_json(request, route.dialect.reply(reply))
            # Only now, because a reply that was not sent must not become a Turn.
            answer.delivered()
            # The connection may still break before the client has read the answer.
            self.on_break[request.protocol] = answer.broke
            return response

    async def _read(
        self, session: Session, dialect: Dialect, packed: bytearray, encoding: str, most: int
    ) -> ChatRequest:
        """Read a body of at most `most` bytes; what could block the event loop runs in a thread."""
        replays, long_work = session.replays, session.conversation.long_work
        is_large = bool(encoding) or may_be_large(packed)
        unpack = partial(read_object, packed, encoding, most)
        request, body = None if is_large else replays.read(dialect, packed), None
        if not is_large and request is None:
            body = read_plain(packed)
            if body is None:  # the repair or the refusal of a body takes more than one pass over it
                body = await long_work.run(session.id, unpack)
            num_values = count_values(body, most=LONG_VALUES)
            is_large = num_values > LONG_VALUES or num_items(body) > LONG_MESSAGES
            if not is_large:
                request = replays.keep(dialect, body, packed) or dialect.parse(body)
        if request is None:
            request = await long_work.run(session.id, lambda: dialect.parse(body or unpack()))
        for name, num, bound in (
            ("messages", len(request.messages), MOST_MESSAGES),
            ("tools", len(request.tools) + len(request.late_tools), MOST_TOOLS),
        ):
            if num > bound:
                raise too_large(f"{num} {name} > {bound} maximum")
        # A head that is known is not parsed, but its messages are looked up.
        return replace(request, is_large=is_large or len(request.messages) > LONG_MESSAGES)


async def _fail(
    request: web.BaseRequest, stream: EventStream, dialect: Dialect, error: Exception
) -> web.StreamResponse:
    reply = dialect.error(error)
    try:
        # A stream that has begun can no longer change its HTTP status.
        return await (stream.fail(reply) if stream.started else send(request, reply))
    except ConnectionError:
        return web.Response(status=499)


@dataclass(frozen=True, slots=True)
class _Route:
    dialect: Dialect
    operation: str


class _Routes:
    """The paths of every installed dialect."""

    def __init__(self) -> None:
        dialects = [plugins.load("dialects", name).build() for name in plugins.names("dialects")]
        self._fallback: Dialect = dialects[0]
        self._routes: dict[str, _Route] = {}
        for dialect in dialects:
            for path, operation in dialect.routes.items():
                # If several dialects have a path, the first one serves it.
                self._routes.setdefault(path, _Route(dialect, operation))

    def find(self, path: str) -> _Route | None:
        """Return the route of a path without a trailing slash."""
        if path in self._routes:
            return self._routes[path]
        # One model's page: a request may use any model name, so every name has a page.
        name = path.removeprefix(_MODELS + "/")
        is_name = name not in (path, "") and ".." not in name.split("/")
        return self._routes.get(_MODELS) if is_name else None

    def dialect(self, path: str) -> Dialect:
        """Return the dialect of a path, or of the nearest path above it."""
        while path:
            if route := self.find(path):
                return route.dialect
            path = path.rpartition("/")[0]
        return self._fallback


def _models(name: str) -> Json:
    """Return a list of one model that clients of either vendor can read."""
    data = [_model(name)]
    return {"object": "list", "data": data, "has_more": False, "first_id": name, "last_id": name}


def _model(name: str) -> Json:
    now = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "swerl",
        "type": "model",
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
    }


PING = b": ping\n\n"
"""A comment, which every reader of server-sent events skips."""


_Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Server(web.Server):
    """Serves connections, and reports one that breaks after its last answer.

    A client that leaves cancels its answer (`handler_cancellation`).
    """

    def __init__(
        self,
        handler: _Handler,
        on_break: MutableMapping[web.RequestHandler, Callable[[], None]],
        *,
        most: int,
    ) -> None:
        """Serve at most `most` connections at once.

        `on_break` holds a callback by connection; an entry lasts until the next request.
        """
        super().__init__(self._handle, handler_cancellation=True)
        self._handler = handler
        self._on_break = on_break
        self._most = most

    def __call__(self) -> AgentConnection:
        """Return the handler of a new connection. `read_object` decompresses bodies."""
        loop = asyncio.get_running_loop()
        return AgentConnection(self, loop=loop, access_log=None, auto_decompress=False)  # type: ignore[arg-type]  # None is no log

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Add a connection, or close it if there are too many."""
        super().connection_made(handler, transport)
        if len(self.connections) > self._most:
            transport.abort()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        """Forget a connection; one that ends with an error left bytes unread."""
        callback = self._on_break.pop(handler, None)
        if callback and exc:
            callback()
        super().connection_lost(handler, exc)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._on_break.pop(request.protocol, None)
        return await self._handler(request)


class AgentConnection(web.RequestHandler):
    """One connection. Malformed HTTP is answered with an error that both vendors' SDKs parse."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are no request, and close. Raises ConnectionError."""
        if request.writer is not None and request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        text = "the request is not valid HTTP" if status < 500 else "internal error"
        kind = "invalid_request_error" if status < 500 else "api_error"
        error = {"type": kind, "message": text, "param": None, "code": None}
        body = orjson.dumps({"type": "error", "error": error})
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response


async def send(request: web.BaseRequest, reply: WireReply) -> web.StreamResponse:
    """Send a whole answer. Raises ConnectionError if the client is gone."""
    headers = {**reply.headers, **_request_id()}
    response = web.Response(status=reply.status, headers=headers, body=reply.body)
    await response.prepare(request)
    await response.write_eof()
    return response


async def send_json(request: web.BaseRequest, value: Json) -> web.StreamResponse:
    """Send a JSON answer. Raises ConnectionError if the client is gone."""
    response = web.Response(
        body=orjson.dumps(value), content_type="application/json", headers=_request_id()
    )
    await response.prepare(request)
    await response.write_eof()
    return response


class EventStream:
    """Server-sent events. Raises ConnectionError if the client is gone."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """True once the status line was sent; an error is an event from then on."""
        return self._response is not None

    async def ping(self) -> None:
        """Show the client that the answer is still pending."""
        await (await self._open()).write(PING)

    async def finish(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send the events, and end the stream; all in one write unless a ping began it."""
        written = b"".join(events)
        if self._response is None:
            self._response = web.Response(headers=_stream_headers(), body=written)
            await self._response.prepare(self._request)
        else:
            await self._response.write(written)
        await self._response.write_eof()
        return self._response

    async def fail(self, error: WireReply) -> web.StreamResponse:
        """End the stream with an error event."""
        return await self.finish([b"event: error\ndata: " + error.body + b"\n\n"])

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(headers=_stream_headers())
            await self._response.prepare(self._request)
        return self._response


def _stream_headers() -> dict[str, str]:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    return headers | _request_id()


def _request_id() -> dict[str, str]:
    """Return the headers in which the vendors' clients look for a request id to show in errors."""
    name = f"req_{uuid.uuid4().hex}"
    return {"request-id": name, "x-request-id": name}
