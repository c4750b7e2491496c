"""One HTTP request from its path to its answer; every failure leaves in its vendor's shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from aiohttp import web

from swerl.core.chat import Json
from swerl.core.contracts import Dialect
from swerl.core.errors import GatewayError, Refusal, SwerlError
from swerl.gateway._body import read_body, read_object
from swerl.gateway._http import EventStream, send, send_json
from swerl.gateway.intake import Intake
from swerl.gateway.pipeline import Conversation
from swerl.gateway.retries import read_asker
from swerl.gateway.routes import MODELS, Route, Routes
from swerl.gateway.sessions import ServedSession

PING_S = 5.0
"""Seconds of silence after which a streaming client is shown that its answer is being made."""

_CHECKS = frozenset({"", "/api/hello", "/healthz"})
"""Paths at which agents and people look whether somebody is there."""

OnRefused: TypeAlias = Callable[[str, Exception], None]
"""Told of each request that ends in an error, with its session's id; empty where it has none."""

_METHODS: Mapping[str, str] = {"chat": "POST", "count_tokens": "POST", "models": "GET"}


class Router:
    """Answers requests for the sessions that are open."""

    def __init__(
        self, model_name: str, intake: Intake, on_refused: OnRefused | None = None
    ) -> None:
        self.sessions: dict[str, ServedSession] = {}
        """Open sessions by key."""
        self.on_break: dict[web.RequestHandler, Callable[[], None]] = {}
        """Whom to tell where a connection breaks after its last answer."""
        self._model_name = model_name
        self._intake = intake
        self._on_refused = on_refused
        self._routes = Routes()

    async def handle(
        self, alone: ServedSession | None, request: web.BaseRequest
    ) -> web.StreamResponse:
        """Answer a request to one session alone, or to the session that its key names."""
        path = request.path.rstrip("/")
        if request.method == "HEAD" or (request.method == "GET" and path in _CHECKS):
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
        except SwerlError as error:
            self._tell(session, error)
            return await _fail(request, stream, dialect, error)
        except ConnectionError:
            return web.Response(status=499)
        except Exception as error:  # noqa: BLE001  # the boundary: a client always gets an answer
            self._tell(session, error)
            return await _fail(request, stream, dialect, error)

    def _tell(self, session: ServedSession | None, error: Exception) -> None:
        if self._on_refused:
            self._on_refused(session.id if session else "", error)

    def _session(self, headers: Mapping[str, str], dialect: Dialect) -> ServedSession:
        key = dialect.session_key(headers)
        session = self.sessions.get(key) if key else None
        if session is None:
            raise GatewayError(
                "no open session answers to this API key" if key else "no API key was sent",
                refusal=Refusal.AUTHENTICATION,
            )
        return session

    async def _serve(
        self, request: web.BaseRequest, stream: EventStream, route: Route, session: ServedSession
    ) -> web.StreamResponse:
        if route.operation == "models":
            name = request.path.rstrip("/").partition(MODELS + "/")[2]
            return await send_json(request, _model(name) if name else _models(self._model_name))
        session.conversation.admission.knock()
        async with self._intake.place(session.id):
            return await self._answer(request, stream, route, session.conversation)

    async def _answer(
        self, request: web.BaseRequest, stream: EventStream, route: Route, talk: Conversation
    ) -> web.StreamResponse:
        most, encoding = talk.limits.max_body_bytes, request.headers.get("Content-Encoding", "")
        async with talk.admission.reading:
            packed = await read_body(request, most)
        await self._intake.turns.take()
        asked = route.dialect.parse(read_object(packed, encoding, most))
        del packed
        if route.operation == "count_tokens":
            return await send_json(request, _count(await talk.count(asked)))
        asker = read_asker(request.headers)
        async with talk.answer(asked, asker) as answer:
            while asked.stream and not await answer.ready(PING_S):
                await stream.ping()
            reply = await answer.reply()
            if asked.stream:
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


def _count(num_tokens: int) -> Json:
    """Return a count of tokens that readers of either vendor's understand."""
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _models(name: str) -> Json:
    """Return a list of one model that readers of either vendor's list understand."""
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
