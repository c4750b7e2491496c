"""E2B's REST interface: create, connect, list, prolong and remove sandboxes.

Every other path of E2B's interface answers 501, so that a client learns at once that it relies on
something that this server does not have.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qsl, unquote

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import SandboxUnavailableError
from swerl.core.sandbox import SandboxOrder
from swerl.sandboxes.e2b_server.connect import (
    Message,
    get_integer,
    get_table,
    get_text,
    parse_object,
    read_body,
)
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.served import (
    SandboxRequest,
    ServedSandbox,
    ServedSandboxes,
    ServerOptions,
)

ENVD_VERSION = "0.5.7"
"""The version of envd that the SDK sees: this one uploads plain bytes, without file metadata."""
NO_BACKEND = 424
"""Status for a run's own client: this machine cannot run the backend, so a retry cannot succeed."""
_MAX_BODY_BYTES = 1 << 20
_DEFAULT_TIMEOUT_S = {"/sandboxes": 15, "/v2/sandboxes": 300}
_CONNECT_TIMEOUT_S = 300
_UNSUPPORTED = ("autoPause", "autoPauseMemory", "mcp", "volumeMounts", "iam")
"""Options that would change what a client relies on are refused; other unknown ones are ignored."""
_CLIENT = "swerl"
_OF_THIS_MACHINE = re.compile(
    r"(?:[a-z+-]+:)?[/.~]|(?:dir|oci|file|oci-archive|docker-archive|snapshot):"
)
"""References that name a file or folder of the server's machine."""


class Control:
    def __init__(self, sandboxes: ServedSandboxes, options: ServerOptions) -> None:
        self._served = sandboxes
        self._options = options
        self.domain = ""
        """Part of the host names under which the sandboxes' own ports are reached."""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a request whose key was checked."""
        path = request.path.rstrip("/")
        for method, pattern, handler in _ROUTES:
            match = pattern.fullmatch(path)
            if match and method == request.method:
                return await handler(self, request, *match.groups())
        message = f"this server does not serve {request.method} {path[:100]}"
        raise WireError(Code.UNIMPLEMENTED, message)

    async def health(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text="Health check successful")

    async def create(self, request: web.BaseRequest) -> web.Response:
        body = await _body(request)
        for name in _UNSUPPORTED:
            if body.get(name):
                raise WireError(Code.UNIMPLEMENTED, f"this server does not serve {name!r}")
        metadata = get_table(body, "metadata")
        template = get_text(body, "templateID")
        order = self._order(metadata)
        wish = SandboxRequest(
            template=template,
            image=order.image if order else choose(template, metadata, self._options),
            timeout_s=self._timeout_s(body, _DEFAULT_TIMEOUT_S[request.path.rstrip("/")]),
            metadata=metadata,
            env=get_table(body, "envVars"),
            order=order,
        )
        try:
            served = await self._served.create(wish)
        except SandboxUnavailableError as error:
            if order is None:
                raise
            raise WireError(Code.INTERNAL, error.explained(), status=NO_BACKEND) from error
        return _json(self._opened(served), 201)

    async def connect(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Connect a client to a running sandbox. May prolong its time, never cuts it."""
        served = self._served.require(sandbox_id)
        timeout_s = self._timeout_s(await _body(request), _CONNECT_TIMEOUT_S)
        served.live_for(max(timeout_s, served.left_s))
        return _json(self._opened(served))

    async def get(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        served = self._served.require(sandbox_id)
        more = {"envdAccessToken": served.token, "domain": self.domain}
        return _json({**_listed(served), **more, "allowInternetAccess": False})

    async def delete(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Remove a sandbox; answer once it is gone."""
        await self._served.remove(self._served.require(sandbox_id))
        return web.Response(status=204)

    async def set_timeout(self, request: web.BaseRequest, sandbox_id: str) -> web.Response:
        """Set the seconds that a sandbox lives from now on."""
        served = self._served.require(sandbox_id)
        without_field = -1  # is refused; 0 would end the sandbox
        served.live_for(self._timeout_s(await _body(request), without_field))
        return web.Response(status=204)

    async def list(self, request: web.BaseRequest) -> web.Response:
        """List the running sandboxes with this metadata in one page, the newest first."""
        metadata, states = _metadata(request.query), request.query.get("state", "running")
        return _json(
            [
                _listed(served)
                for served in reversed(self._served.all())
                if metadata.items() <= served.created.metadata.items()
                and "running" in states.split(",")
            ]
        )

    def _opened(self, served: ServedSandbox) -> dict[str, Json]:
        """Return the answer to create and connect: all that a client needs to use the sandbox."""
        return {
            "templateID": served.created.template,
            "sandboxID": served.id,
            "clientID": _CLIENT,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": served.token,
            "trafficAccessToken": served.traffic_token,
            "domain": self.domain,
        }

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
    ("GET", r"/v2/sandboxes", Control.list),
    ("GET", _ID, Control.get),
    ("DELETE", _ID, Control.delete),
    ("POST", rf"(?:/v2)?{_ID}/connect", Control.connect),
    ("POST", rf"{_ID}/timeout", Control.set_timeout),
)
_ROUTES = [(method, re.compile(pattern), handler) for method, pattern, handler in _TABLE]


def choose(template: str, metadata: Mapping[str, str], options: ServerOptions) -> str:
    """Return the image for a client's template id and metadata.

    Raises WireError if they name none, or a folder of the server's own machine: only the operator
    may offer those, as a template.
    """
    name = metadata.get(options.image_key) or template
    for candidate in (name, unquote(name)):
        if image := options.templates.get(candidate):
            return image
    name = unquote(name)
    if not name:
        raise WireError(Code.INVALID_ARGUMENT, "the request names no template")
    if _OF_THIS_MACHINE.match(name):
        message = (
            f"template {name[:200]!r} names files of the server, which only its operator may offer"
        )
        raise WireError(Code.PERMISSION_DENIED, message)
    return name


def _listed(served: ServedSandbox) -> dict[str, Json]:
    """Return a sandbox as lists show it."""
    return {
        "templateID": served.created.template,
        "sandboxID": served.id,
        "clientID": _CLIENT,
        "startedAt": _time(served.started_unix_s),
        "endAt": _time(time.time() + served.left_s),
        "cpuCount": math.ceil(served.limits.num_cpus),
        "memoryMB": served.limits.memory_mib,
        "diskSizeMB": served.limits.disk_mib,
        "metadata": dict(served.created.metadata),
        "state": "running",
        "envdVersion": ENVD_VERSION,
    }


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def _metadata(query: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata filter of a query; the SDK encodes each part twice."""
    pairs = parse_qsl(query.get("metadata", ""), keep_blank_values=True)
    return {unquote(name): unquote(value) for name, value in pairs}


async def _body(request: web.BaseRequest) -> Message:
    return parse_object(await read_body(request, _MAX_BODY_BYTES))


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
