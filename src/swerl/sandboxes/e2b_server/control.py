"""E2B's REST interface: create, list, prolong and remove sandboxes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import unquote

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import SandboxUnavailableError, SwerlError
from swerl.core.sandbox import SandboxOrder
from swerl.sandboxes._e2b.direct import ANSWERS
from swerl.sandboxes.e2b_server import views
from swerl.sandboxes.e2b_server.connect import (
    Message,
    get_integer,
    get_table,
    get_text,
    read_object,
)
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.served import (
    PREPARED,
    SandboxRequest,
    ServedSandboxes,
    ServerOptions,
)
from swerl.sandboxes.e2b_server.views import ListQuery, page, wanted_metadata

_MAX_BODY_BYTES = 1 << 20
_DEFAULT_TIMEOUT_S = {"/sandboxes": 15, "/v2/sandboxes": 300}
_CONNECT_TIMEOUT_S = 300
_UNSUPPORTED = {
    "autoPauseMemory": "keep memory: pause with mode='filesystem'",
    "mcp": "run MCP servers",
    "volumeMounts": "mount volumes",
    "iam": "give sandboxes an identity",
}
"""Options that would change what a client relies on are refused; other unknown ones are ignored."""
NO_BACKEND = 424
"""Status for a run's own client: this machine cannot run the backend, so a retry cannot succeed."""
_NO_MEMORY = "memory is not kept: use mode='filesystem'"
_NOT_SERVED = "this server does not build templates or open networks"
_MAX_FORKS = 100
_OF_THIS_MACHINE = re.compile(
    r"(?:[a-z+-]+:)?[/.~]|(?:dir|oci|file|oci-archive|docker-archive|(?:swerl-)?snapshot):"
)
"""References that name a file or folder of the server's machine."""


class Control:
    def __init__(self, sandboxes: ServedSandboxes, options: ServerOptions) -> None:
        self._served = sandboxes
        self._options = options
        self._started_unix_s = time.time()
        self.domain = ""
        """Part of the host names under which the sandboxes' own ports are reached."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request whose key was checked."""
        path = request.path.rstrip("/")
        allowed = False
        for method, pattern, handler in _ROUTES:
            if match := pattern.fullmatch(path):
                if method == request.method:
                    return await handler(self, request, *match.groups())
                allowed = True
        if allowed:
            raise WireError(Code.UNIMPLEMENTED, "the method is not allowed here", status=405)
        raise WireError(Code.NOT_FOUND, f"there is no route {path[:100]}")

    async def health(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text="Health check successful")

    async def create(self, request: web.BaseRequest) -> web.Response:
        body = await _body(request)
        for name, ability in _UNSUPPORTED.items():
            if body.get(name):
                raise WireError(Code.INVALID_ARGUMENT, f"this server cannot {ability}")
        metadata = get_table(body, "metadata")
        template = get_text(body, "templateID")
        order = self._order(metadata)
        wanted = SandboxRequest(
            template=template,
            image=self._image(template, metadata),
            timeout_s=self._timeout_s(body, _DEFAULT_TIMEOUT_S[request.path.rstrip("/")]),
            metadata=metadata,
            env=get_table(body, "envVars"),
            idempotency_key=request.headers.get("Idempotency-Key", ""),
            order=order,
            auto_pause=body.get("autoPause") is True,
        )
        try:
            served = await self._served.create(wanted)
        except SandboxUnavailableError as error:
            if order is None:
                raise
            message = f"{error} ({error.hint})"
            raise WireError(Code.FAILED_PRECONDITION, message, status=NO_BACKEND) from error
        return _json(views.opened(served, self.domain), 201)

    async def connect(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Connect a client to a running sandbox, or resume a paused one.

        May prolong its time, never cuts it.
        """
        timeout_s = self._timeout_s(await _body(request), _CONNECT_TIMEOUT_S)
        if paused := self._served.find_paused(sandbox_id):
            served = await self._served.resume(paused, timeout_s)
            return _json(views.opened(served, self.domain), 201)
        served = self._served.require(sandbox_id)
        served.live_for(max(timeout_s, served.left_s))
        return _json(views.opened(served, self.domain))

    async def resume(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Resume a paused sandbox."""
        if not self._served.find_paused(sandbox_id):
            self._served.require(sandbox_id)
            message = f"sandbox {sandbox_id} is already running"
            raise WireError(Code.FAILED_PRECONDITION, message, status=409)
        return await self.connect(request, sandbox_id)

    async def pause(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Keep a sandbox's files until a client connects again, and end the sandbox."""
        served, body = self._served.require(sandbox_id), await _body(request)
        _check_memory(body)
        await self._served.pause(served)
        return web.Response(status=204)

    async def snapshot(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Keep a sandbox's files as a template. Memory and processes are not kept."""
        served, body = self._served.require(sandbox_id), await _body(request)
        _check_memory(body)
        name = get_text(body, "name")
        made = await self._served.snapshot(served, name)
        return _json({"snapshotID": made.id, "names": [name] if name else []}, 201)

    async def snapshots(self, request: web.BaseRequest) -> web.Response:
        """List the snapshots, of one sandbox or all."""
        wanted = request.query.get("sandboxID", "")
        whole = [made for made in self._served.snapshots.values() if made.image]
        found = [made for made in whole if wanted in ("", made.served.id)]
        return _json([{"snapshotID": made.id, "names": [made.id]} for made in found])

    async def fork(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Open sandboxes with a sandbox's files; those that cannot be opened answer an error."""
        served, body = self._served.require(sandbox_id), await _body(request)
        timeout_s = self._timeout_s(body, _CONNECT_TIMEOUT_S)
        count = get_integer(body, "count", 1)
        if not 1 <= count <= _MAX_FORKS:
            raise WireError(Code.INVALID_ARGUMENT, f"count must be 1 to {_MAX_FORKS}")
        made = await self._served.snapshot(served)
        wanted = served.created.of_snapshot(made, timeout_s)

        async def one() -> dict[str, Json]:
            try:
                return {"sandbox": views.opened(await self._served.create(wanted), self.domain)}
            except (WireError, SwerlError) as error:
                status = getattr(error, "status", None) or 500
                return {"error": {"code": status, "message": str(error)}}

        try:
            return _json(list(await asyncio.gather(*(one() for _ in range(count)))), 201)
        finally:
            await self._served.drop_snapshot(made)

    async def delete_template(self, request: web.BaseRequest, name: str) -> web.Response:
        """Remove a snapshot; the operator's templates stay."""
        if made := self._served.snapshots.get(unquote(name)):
            await self._served.drop_snapshot(made)
            return web.Response(status=204)
        raise WireError(Code.NOT_FOUND, f"snapshot {name[:100]!r} was not found")

    async def identify(self, request: web.BaseRequest) -> web.Response:
        """Return a text that changes with the content of the image that a create call gets."""
        body = await _body(request)
        image = self._image(get_text(body, "templateID"), get_table(body, "metadata"))
        return _answer(await self._served.prepared.identify(image))

    async def find_prepared(self, request: web.BaseRequest) -> web.Response:
        return _answer(await self._served.prepared.find_snapshot(request.query.get("name", "")))

    async def drop_prepared(self, request: web.BaseRequest) -> web.Response:
        await self._served.prepared.drop_snapshot(request.query.get("name", ""))
        return _answer("")

    async def snapshot_root(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Return the folder whose files a snapshot keeps; empty: none can be taken."""
        return _answer(getattr(self._served.require(sandbox_id).sandbox, "snapshot_root", ""))

    async def prepare(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Keep a sandbox's files as a prepared snapshot, and return its reference."""
        served, name = self._served.require(sandbox_id), request.query.get("name", "")
        return _answer(await self._served.prepared.take(served, name))

    async def get(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        served = self._served.find_paused(sandbox_id) or self._served.require(sandbox_id)
        return _json(views.detail(served, self.domain))

    async def delete(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Remove a sandbox; answer once it is gone."""
        served = self._served.find_paused(sandbox_id) or self._served.require(sandbox_id)
        await self._served.remove(served)
        return web.Response(status=204)

    async def set_timeout(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Set the seconds that a sandbox lives from now on."""
        served = self._served.require(sandbox_id)
        without_field = -1  # is refused; 0 would end the sandbox
        served.live_for(self._timeout_s(await _body(request), without_field))
        return web.Response(status=204)

    async def refresh(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Prolong a sandbox; its time is never cut."""
        served = self._served.require(sandbox_id)
        seconds = get_integer(await _body(request), "duration", _DEFAULT_TIMEOUT_S["/sandboxes"])
        served.live_for(max(min(seconds, self._options.max_lifetime_s), served.left_s))
        return web.Response(status=204)

    async def list(self, request: web.BaseRequest) -> web.Response:
        """List running and paused sandboxes in pages."""
        query = ListQuery.read(request.query)
        found, next_token = page([*self._served.all(), *self._served.paused.values()], query)
        headers = {"X-Next-Token": next_token} if next_token else {}
        return _json([views.listed(served) for served in found], headers=headers)

    async def list_v1(self, request: web.BaseRequest) -> web.Response:
        """List all running sandboxes at once."""
        query = ListQuery(metadata=wanted_metadata(request.query))
        found = [served for served in self._served.all() if query.fits(served)]
        return _json([views.listed(served) for served in found])

    async def metrics(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Answer without a measurement: backends make none."""
        self._served.require(sandbox_id)
        return _json([])

    async def all_metrics(self, request: web.BaseRequest) -> web.Response:
        """Answer without a measurement: backends make none."""
        return _json({"sandboxes": {}})

    async def logs(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Answer without a log: the server keeps no output of its sandboxes."""
        self._served.require(sandbox_id)
        return _json({"logs": [], "logEntries": []})

    async def templates(self, request: web.BaseRequest) -> web.Response:
        """List the operator's templates."""
        names = sorted(self._options.templates)
        return _json([self._template(name) for name in names])

    async def template(self, request: web.BaseRequest, name: str) -> web.Response:
        if name not in self._options.templates:
            raise WireError(Code.NOT_FOUND, f"template {name[:100]!r} was not found")
        return _json({**self._template(name), "builds": []})

    async def alias(self, request: web.BaseRequest, name: str) -> web.Response:
        """Return the template of the same name: a template is its only alias."""
        if name not in self._options.templates:
            raise WireError(Code.NOT_FOUND, f"template {name[:100]!r} was not found")
        return _json({"templateID": name, "public": False})

    async def not_served(self, request: web.BaseRequest, *_: str) -> web.Response:
        """Refuse calls that no backend can serve."""
        raise WireError(Code.UNIMPLEMENTED, _NOT_SERVED)

    def _template(self, name: str) -> dict[str, Json]:
        return views.template(name, self._options.limits, self._started_unix_s)

    def _image(self, template: str, metadata: Mapping[str, str]) -> str:
        """Return the image of a create call, which may be a snapshot of this server."""
        if order := self._order(metadata):
            return order.image
        served, named = self._served, metadata.get(self._options.image_key) or template
        found = served.prepared.find(named) or served.snapshots.get(template)
        return found.image if found else choose(template, metadata, self._options)

    def _order(self, metadata: Mapping[str, str]) -> SandboxOrder | None:
        text = metadata.get(SandboxOrder.KEY)
        if text is None or not self._options.takes_orders:
            return None
        try:
            return SandboxOrder.from_text(text)
        except (ValueError, KeyError, TypeError) as error:
            message = f"the sandbox order cannot be read: {error!r}"
            raise WireError(Code.INVALID_ARGUMENT, message) from error

    def _timeout_s(self, body: Message, default: int) -> float:
        seconds = get_integer(body, "timeout", default)
        if not 0 <= seconds <= self._options.max_lifetime_s:
            message = f"timeout must be 0 to {self._options.max_lifetime_s:.0f} seconds"
            raise WireError(Code.INVALID_ARGUMENT, f"{message}, not {seconds}")
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
    ("POST", rf"{_ID}/snapshots", Control.snapshot),
    ("POST", rf"{_ID}/fork", Control.fork),
    ("GET", r"/snapshots", Control.snapshots),
    ("DELETE", r"/templates/([^/]+)", Control.delete_template),
    ("POST", r"/swerl/identity", Control.identify),
    ("GET", r"/swerl/snapshots", Control.find_prepared),
    ("DELETE", r"/swerl/snapshots", Control.drop_prepared),
    ("GET", rf"/swerl{_ID}/snapshot", Control.snapshot_root),
    ("POST", rf"/swerl{_ID}/snapshot", Control.prepare),
    ("PUT", rf"{_ID}/network", Control.not_served),
    ("GET", r"(?:/v2)?/templates", Control.templates),
    ("GET", r"/templates/aliases/([^/]+)", Control.alias),
    ("GET", r"/templates/([^/]+)", Control.template),
    ("POST", r"(?:/v[23])?/templates(?:/.*)?", Control.not_served),
)
_ROUTES = [(method, re.compile(pattern), handler) for method, pattern, handler in _TABLE]


def choose(template: str, metadata: Mapping[str, str], options: ServerOptions) -> str:
    """Return the image for a client's template id and metadata.

    Raises WireError if they name none, or a folder of the server's own machine: only the operator
    may offer those, as a template.
    """
    named = metadata.get(options.image_key) or template
    if image := options.templates.get(named):
        return image
    named = unquote(named)
    if image := options.templates.get(named):
        return image
    if not named:
        raise WireError(Code.INVALID_ARGUMENT, "the request names no template")
    if named.startswith(PREPARED):
        raise WireError(Code.NOT_FOUND, "the prepared snapshot is gone")
    if _OF_THIS_MACHINE.match(named):
        message = (
            f"template {named[:200]!r} names files of the server, which only its operator may offer"
        )
        raise WireError(Code.PERMISSION_DENIED, message)
    return named


def _check_memory(body: Message) -> None:
    """Refuse a snapshot or pause that is to keep memory."""
    if body.get("memory") is True:
        raise WireError(Code.UNIMPLEMENTED, _NO_MEMORY)


async def _body(request: web.BaseRequest) -> Message:
    return await read_object(request, _MAX_BODY_BYTES)


def _answer(text: str) -> web.Response:
    """Answer a client of swerl's own."""
    return web.Response(text=text, headers={ANSWERS: "1"})


def _json(body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )
