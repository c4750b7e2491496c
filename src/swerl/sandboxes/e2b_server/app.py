"""The server: listens, finds out who asks for what, and turns failures into answers."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Self

import orjson
from aiohttp import web

from swerl.core.errors import GatewayError, SandboxLostError, SwerlError
from swerl.sandboxes.e2b_server import access, address, direct, envd, ports
from swerl.sandboxes.e2b_server.boxes import Box, Boxes
from swerl.sandboxes.e2b_server.control import Control
from swerl.sandboxes.e2b_server.failure import Code, Failure, as_failure
from swerl.sandboxes.e2b_server.options import ServerOptions
from swerl.sandboxes.e2b_server.transfer import Transfers

if TYPE_CHECKING:
    from types import TracebackType

    from swerl.core.contracts import SandboxBackend

_LOG = logging.getLogger(__name__)
_BACKLOG = 1024
_SHUTDOWN_S = 5.0


class Server:
    """An E2B-compatible server over one backend. Nothing answers without its key or a token."""

    def __init__(
        self, backend: SandboxBackend, key: str, options: ServerOptions | None = None
    ) -> None:
        self.url = ""
        self._key = key
        self._options = options or ServerOptions()
        self._boxes = Boxes(backend, self._options)
        self._control = Control(self._boxes, self._options)
        self._transfers = Transfers(self._options.max_file_mib << 20)
        self._server = web.Server(
            self._handle, handler_cancellation=True, access_log=None, logger=_no_log()
        )
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        host, port = self._options.host, self._options.port
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._server, host, port, backlog=_BACKLOG
            )
        except OSError as error:
            raise GatewayError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                hint="choose another port, or stop what uses it",
            ) from error
        port = self._listener.sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"
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
        await asyncio.shield(self._boxes.close())
        self._server.pre_shutdown()
        await self._server.shutdown(_SHUTDOWN_S)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Exception as error:
            if isinstance(error, ConnectionError) and not isinstance(error, SwerlError):
                raise  # the client is gone
            failure = as_failure(error)
            if failure is not error and failure.code is Code.INTERNAL:
                _LOG.warning("%s %s failed", request.method, request.path, exc_info=error)
            is_rpc = request.path.startswith(envd.SERVICES) and not failure.about
            return web.Response(
                body=orjson.dumps(failure.rpc() if is_rpc else failure.rest()),
                status=failure.status,
                content_type="application/json",
            )

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        to = address.of(request.headers)
        if to is not None and to.port != envd.PORT:
            tokens = access.traffic_token_of(request.headers), access.token_of(request.headers)
            box = self._boxes.open_port_with(to.sandbox_id, *tokens)
            return await ports.relay(box, to.port, request, key=self._key)
        if envd.serves(request.path) and (to is not None or request.path != "/health"):
            box = self._admitted(to.sandbox_id if to else "", request)
            try:
                return await envd.answer(box, request, self._transfers)
            except SandboxLostError as error:
                box.end(from_inside=error.from_inside)
                raise
        access.require_key(request.headers, self._key)
        if to is not None and self._options.takes_orders and request.path in direct.PATHS:
            box = self._boxes.require(to.sandbox_id)
            return await direct.answer(box, request, self._options.max_file_mib << 20)
        return await self._control.answer(request)

    def _admitted(self, sandbox_id: str, request: web.BaseRequest) -> Box:
        """Return the sandbox that a token opens, or a signed address of a file in it.

        A signed address may not say which sandbox it is for; its signature does.
        """
        token = access.token_of(request.headers)
        if token or request.path != "/files" or "signature" not in request.query:
            return self._boxes.open_with(sandbox_id, token)
        boxes = [self._boxes.find(sandbox_id)] if sandbox_id else self._boxes.all()
        operation = "read" if request.method == "GET" else "write"
        for box in filter(None, boxes):
            if access.is_signed(request.query, operation, box.token):
                return box
        message = "the address is signed wrongly, or has expired, or its sandbox is gone"
        raise Failure(Code.UNAUTHENTICATED, message)


def _no_log() -> logging.Logger:
    """Return a logger for aiohttp that says nothing: it would quote headers, and so keys."""
    logger = logging.Logger(f"{__name__}.http")
    logger.addHandler(logging.NullHandler())
    return logger
