"""E2B's REST interface: sandboxes are made, found, prolonged and removed here."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import SandboxUnavailableError
from swerl.core.sandbox import SandboxOrder
from swerl.sandboxes.e2b_server import fields, images, views
from swerl.sandboxes.e2b_server.boxes import Boxes, Wish
from swerl.sandboxes.e2b_server.connect import read_body
from swerl.sandboxes.e2b_server.failure import Code, Failure
from swerl.sandboxes.e2b_server.fields import Message
from swerl.sandboxes.e2b_server.options import ServerOptions
from swerl.sandboxes.e2b_server.pages import Question, page, wanted_metadata

_MAX_BODY_BYTES = 1 << 20
_DEFAULT_TIMEOUT_S = {"/sandboxes": 15, "/v2/sandboxes": 300}
_CONNECT_TIMEOUT_S = 300
_UNSUPPORTED = {
    "autoPause": "pause sandboxes: create with auto_pause off",
    "mcp": "run MCP servers",
    "volumeMounts": "mount volumes",
    "iam": "give sandboxes an identity",
}
"""Wishes that would change what a client relies on, and so are refused; others are ignored."""
NO_BACKEND = 424
"""Status that tells a run's own client that no attempt will ever succeed on this machine."""
_NO_PAUSE = "this server cannot pause sandboxes"
_NOT_SERVED = "this server does not build templates, pause, fork or snapshot sandboxes"


class Control:
    """Answers the REST interface."""

    def __init__(self, boxes: Boxes, options: ServerOptions) -> None:
        self._boxes = boxes
        self._options = options
        self._started_unix_s = time.time()
        self.domain = ""
        """Part of the host names under which sandboxes' own ports are reached."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request of a client that has the key."""
        path = request.path.rstrip("/")
        allowed = False
        for method, pattern, handler in _ROUTES:
            if match := pattern.fullmatch(path):
                if method == request.method:
                    return await handler(self, request, *match.groups())
                allowed = True
        if allowed:
            raise Failure(Code.UNIMPLEMENTED, "the method is not allowed here", status=405)
        raise Failure(Code.NOT_FOUND, f"nothing is served at {path[:100]}")

    async def health(self, request: web.BaseRequest) -> web.Response:
        """Answer that the server is there."""
        return web.Response(text="Health check successful")

    async def create(self, request: web.BaseRequest) -> web.Response:
        """Make a sandbox."""
        body = await _body(request)
        for name, what in _UNSUPPORTED.items():
            if body.get(name):
                raise Failure(Code.INVALID_ARGUMENT, f"this server cannot {what}")
        metadata = fields.table(body, "metadata")
        template = fields.text(body, "templateID")
        order = self._order(metadata)
        wish = Wish(
            template=template,
            image=order.image if order else images.choose(template, metadata, self._options),
            timeout_s=self._timeout_s(body, _DEFAULT_TIMEOUT_S[request.path.rstrip("/")]),
            metadata=metadata,
            env=fields.table(body, "envVars"),
            idempotency_key=request.headers.get("Idempotency-Key", ""),
            order=order,
        )
        try:
            box = await self._boxes.create(wish)
        except SandboxUnavailableError as error:
            if order is None:
                raise
            message = f"{error} ({error.hint})"
            raise Failure(Code.FAILED_PRECONDITION, message, status=NO_BACKEND) from error
        return _json(views.opened(box, self.domain), 201)

    async def connect(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Let a client into a sandbox that runs; its time is prolonged, never cut."""
        box = self._boxes.require(sandbox_id)
        timeout_s = self._timeout_s(await _body(request), _CONNECT_TIMEOUT_S)
        box.live_for(max(timeout_s, box.left_s))
        return _json(views.opened(box, self.domain))

    async def resume(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Refuse: what cannot be paused runs."""
        self._boxes.require(sandbox_id)
        message = f"sandbox {sandbox_id} is already running"
        raise Failure(Code.FAILED_PRECONDITION, message, status=409)

    async def pause(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Refuse: no backend can pause."""
        self._boxes.require(sandbox_id)
        raise Failure(Code.UNIMPLEMENTED, _NO_PAUSE)

    async def get(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Tell about a sandbox."""
        return _json(views.detail(self._boxes.require(sandbox_id), self.domain))

    async def delete(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Remove a sandbox; answers when it is gone."""
        await self._boxes.remove(self._boxes.require(sandbox_id))
        return web.Response(status=204)

    async def set_timeout(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Let a sandbox live so many seconds from now."""
        box = self._boxes.require(sandbox_id)
        box.live_for(self._timeout_s(await _body(request), 0))
        return web.Response(status=204)

    async def refresh(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Prolong a sandbox; its time is never cut."""
        box = self._boxes.require(sandbox_id)
        seconds = fields.integer(await _body(request), "duration", _DEFAULT_TIMEOUT_S["/sandboxes"])
        box.live_for(max(min(seconds, self._options.max_lifetime_s), box.left_s))
        return web.Response(status=204)

    async def list(self, request: web.BaseRequest) -> web.Response:
        """List sandboxes, in pages."""
        question = Question.read(request.query)
        found, following = page(self._boxes.all(), question)
        headers = {"X-Next-Token": following} if following else {}
        return _json([views.listed(box) for box in found], headers=headers)

    async def list_v1(self, request: web.BaseRequest) -> web.Response:
        """List sandboxes, all at once."""
        question = Question(metadata=wanted_metadata(request.query))
        found = [box for box in self._boxes.all() if question.fits(box)]
        return _json([views.listed(box) for box in found])

    async def metrics(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Answer with no measurement: backends make none."""
        self._boxes.require(sandbox_id)
        return _json([])

    async def all_metrics(self, request: web.BaseRequest) -> web.Response:
        """Answer with no measurement: backends make none."""
        return _json({"sandboxes": {}})

    async def logs(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Answer with no log: the server keeps none of what runs in its sandboxes."""
        self._boxes.require(sandbox_id)
        return _json({"logs": [], "logEntries": []})

    async def templates(self, request: web.BaseRequest) -> web.Response:
        """List the operator's templates."""
        names = sorted(self._options.templates)
        return _json([self._template(name) for name in names])

    async def template(self, request: web.BaseRequest, name: str) -> web.Response:
        """Tell about one of the operator's templates."""
        if name not in self._options.templates:
            raise Failure(Code.NOT_FOUND, f"template {name[:100]!r} was not found")
        return _json({**self._template(name), "builds": []})

    async def alias(self, request: web.BaseRequest, name: str) -> web.Response:
        """Tell which template an alias names: the one of that name."""
        if name not in self._options.templates:
            raise Failure(Code.NOT_FOUND, f"template {name[:100]!r} was not found")
        return _json({"templateID": name, "public": False})

    async def not_served(self, request: web.BaseRequest, *_: str) -> web.Response:
        """Refuse what no sandbox of swerl's can do."""
        raise Failure(Code.UNIMPLEMENTED, _NOT_SERVED)

    def _template(self, name: str) -> dict[str, Json]:
        return views.template(name, self._options.limits, self._started_unix_s)

    def _order(self, metadata: Mapping[str, str]) -> SandboxOrder | None:
        text = metadata.get(SandboxOrder.KEY)
        if text is None or not self._options.takes_orders:
            return None
        try:
            return SandboxOrder.from_text(text)
        except (ValueError, KeyError, TypeError) as error:
            message = f"the order of a sandbox cannot be read: {error!r}"
            raise Failure(Code.INVALID_ARGUMENT, message) from error

    def _timeout_s(self, body: Message, default: int) -> float:
        seconds = fields.integer(body, "timeout", default)
        if not 0 <= seconds <= self._options.max_lifetime_s:
            message = f"timeout must be 0 to {self._options.max_lifetime_s:.0f} seconds"
            raise Failure(Code.INVALID_ARGUMENT, f"{message}, not {seconds}")
        return seconds


_ID = r"/sandboxes/([A-Za-z0-9-]+)"
_Handler = Callable[..., Awaitable[web.Response]]
_TABLE: tuple[tuple[str, str, _Handler], ...] = (
    ("GET", r"/health", Control.health),
    ("POST", r"(?:/v2)?/sandboxes", Control.create),
    ("GET", r"/sandboxes", Control.list_v1),
    ("GET", r"/v2/sandboxes", Control.list),
    ("GET", r"/sandboxes/metrics", Control.all_metrics),
    ("GET", _ID, Control.get),
    ("DELETE", _ID, Control.delete),
    ("POST", rf"(?:/v2)?{_ID}/connect", Control.connect),
    ("POST", rf"{_ID}/resume", Control.resume),
    ("POST", rf"{_ID}/pause", Control.pause),
    ("POST", rf"{_ID}/timeout", Control.set_timeout),
    ("POST", rf"{_ID}/refreshes", Control.refresh),
    ("GET", rf"{_ID}/metrics", Control.metrics),
    ("GET", rf"(?:/v2)?{_ID}/logs", Control.logs),
    ("POST", rf"{_ID}/(?:snapshots|fork)", Control.not_served),
    ("PUT", rf"{_ID}/network", Control.not_served),
    ("GET", r"(?:/v2)?/templates", Control.templates),
    ("GET", r"/templates/aliases/([^/]+)", Control.alias),
    ("GET", r"/templates/([^/]+)", Control.template),
    ("POST", r"(?:/v[23])?/templates(?:/.*)?", Control.not_served),
)
_ROUTES = [(method, re.compile(pattern), handler) for method, pattern, handler in _TABLE]


async def _body(request: web.BaseRequest) -> Message:
    """Return a request's JSON object; an absent one is empty."""
    data = await read_body(request, _MAX_BODY_BYTES)
    try:
        value: Any = orjson.loads(data) if data else {}
    except orjson.JSONDecodeError as error:
        raise Failure(Code.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise Failure(Code.INVALID_ARGUMENT, "the body must be a JSON object")
    return value


def _json(body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )
