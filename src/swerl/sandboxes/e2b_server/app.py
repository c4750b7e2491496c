"""The server: listen, route requests, and turn errors into answers."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import orjson
from aiohttp import web

from swerl.core.contracts import SandboxBackend
from swerl.core.errors import GatewayError, SandboxLostError, SwerlError
from swerl.sandboxes.e2b_server import access, envd, ports
from swerl.sandboxes.e2b_server.control import Control
from swerl.sandboxes.e2b_server.failure import Code, as_failure
from swerl.sandboxes.e2b_server.served import ServedSandboxes, ServerOptions

_LOG = logging.getLogger(__name__)
_BACKLOG = 1024
_SHUTDOWN_S = 5.0
_HOST = re.compile(r"(\d{1,5})-([0-9a-f]{20})(?:-[a-z0-9]+)?\.[^/]+", re.IGNORECASE)
"""`<port>-<id>.<domain>`; old SDKs append a suffix to the id. No machine has such a name."""
_NUM_FILES = 65536


class SandboxServer:
    """An E2B-compatible server over one backend. Every request needs its key or a token."""

    def __init__(
        self, backend: SandboxBackend, key: str, options: ServerOptions | None = None
    ) -> None:
        self.url = ""
        self._key = key
        self._options = options or ServerOptions()
        self._served = ServedSandboxes(backend, self._options)
        self._control = Control(self._served, self._options)
        self._server = web.Server(
            self._handle, handler_cancellation=True, access_log=None, logger=_silent_log()
        )
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        host, port = self._options.host, self._options.port
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._server, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise GatewayError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="choose another address, or stop the program that uses it",
            ) from error
        port = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._control.domain = f"localhost:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        await asyncio.shield(self._served.close())
        self._server.pre_shutdown()
        await self._server.shutdown(_SHUTDOWN_S)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request and log it, without its query and body: those may have secrets."""
        status = 499  # the client is gone
        try:
            response = await self._answer(request)
            status = response.status
            return response
        finally:
            method, path = f"{request.method!a:.20}", f"{request.path!a:.200}"
            _LOG.info("%s %s %s %d", request.remote, method, path, status)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Exception as error:
            if isinstance(error, ConnectionError) and not isinstance(error, SwerlError):
                raise  # the client is gone
            failure = as_failure(error)
            if failure is not error and failure.code is Code.INTERNAL:
                _LOG.warning("%.200a failed: %.500r", request.path, error)
                _LOG.debug("the place of that error", exc_info=error)
            is_rpc = request.path.startswith(envd.SERVICES) and not failure.about
            return web.Response(
                body=orjson.dumps(failure.rpc() if is_rpc else failure.rest()),
                status=failure.status,
                content_type="application/json",
            )

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        sandbox_id, port = _target(request.headers)
        token = access.token_of(request.headers)
        if sandbox_id and port != envd.PORT:
            traffic_token = access.traffic_token_of(request.headers)
            served = self._served.open_port_with(sandbox_id, traffic_token, token)
            return await ports.relay(served, port, request, key=self._key)
        if envd.serves(request.path) and (sandbox_id or request.path != "/health"):
            served = self._served.open_with(sandbox_id, token)
            try:
                return await envd.answer(served, request, self._options.max_file_mib << 20)
            except SandboxLostError:
                served.end()
                raise
        access.require_key(request.headers, self._key)
        return await self._control.answer(request)


def _target(headers: Mapping[str, str]) -> tuple[str, int]:
    """Return a request's sandbox, empty if there is none, and its port: from its host
    `<port>-<id>.<domain>`, else from headers."""
    if match := _HOST.fullmatch(headers.get("Host", "")):
        return match[2].lower(), int(match[1])
    port = headers.get("E2b-Sandbox-Port", "")
    is_port = re.fullmatch(r"\d{1,5}", port)
    return headers.get("E2b-Sandbox-Id", ""), int(port) if is_port else envd.PORT


def _silent_log() -> logging.Logger:
    """Return a silent logger for aiohttp: its own would print headers, and so keys."""
    logger = logging.Logger(f"{__name__}.http")
    logger.addHandler(logging.NullHandler())
    return logger


def raise_file_limit() -> None:
    """Raise the limit of open files: a command needs up to three, and sandboxes run many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _NUM_FILES:
        target = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))
