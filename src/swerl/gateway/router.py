"""One HTTP request, from its path to its answer; every failure leaves in its vendor's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web

from swerl.core import plugins
from swerl.core.chat import Json
from swerl.core.contracts import Dialect
from swerl.core.errors import GatewayError, Refusal, SwerlError
from swerl.gateway.connections import EventStream, read_body, read_object, send, send_json
from swerl.gateway.conversation import Conversation, read_requester
from swerl.gateway.limits import GatewayAdmission
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

    def __init__(
        self, model_name: str, admission: GatewayAdmission, on_refused: OnRefused | None = None
    ) -> None:
        self.sessions: dict[str, Session] = {}
        """Open Sessions by key."""
        self.on_break: dict[web.RequestHandler, Callable[[], None]] = {}
        """Callback by connection, if it breaks after its last answer."""
        self._model_name = model_name
        self._admission = admission
        self._on_refused = on_refused
        self._routes = _Routes()

    async def handle(self, alone: Session | None, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request to one Session alone, or to the Session of its key."""
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
        session.conversation.admission.count_request()
        async with self._admission.slot(session.id):
            return await self._answer(request, stream, route, session.conversation)

    async def _answer(
        self,
        request: web.BaseRequest,
        stream: EventStream,
        route: _Route,
        conversation: Conversation,
    ) -> web.StreamResponse:
        most = conversation.limits.max_body_bytes
        encoding = request.headers.get("Content-Encoding", "")
        async with conversation.admission.reading:
            body = await read_body(request, most)
        # From here to the first wait the loop serves no other request.
        await self._admission.parsing.wait()
        chat_request = route.dialect.parse(read_object(body, encoding, most))
        del body
        if route.operation == "count_tokens":
            # Both vendors' clients can read this object.
            num_tokens = await conversation.count(chat_request)
            count: Json = {"object": "response.input_tokens", "input_tokens": num_tokens}
            return await send_json(request, count)
        async with conversation.answer(chat_request, read_requester(request.headers)) as answer:
            while chat_request.stream and not await answer.ready(PING_S):
                await stream.ping()
            reply = await answer.reply()
            if chat_request.stream:
                response = await stream.finish(route.dialect.events(reply))
            else:
                response = await send_json(request, route.dialect.reply(reply))
            answer.delivered()
            self.on_break[request.protocol] = answer.broke
            return response


async def _fail(
    request: web.BaseRequest, stream: EventStream, dialect: Dialect, error: Exception
) -> web.StreamResponse:
    reply = dialect.error(error)
    try:
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
