"""The server: listen, route requests, and turn errors into answers.

A run's own client also uses `POST /swerl/run`, and `GET` or `PUT /swerl/file`. E2B's protocols
stream text and never return the end of a command in one answer, so a client that needs bytes wraps
every command in a supervisor. These paths carry whole results in bytes.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import logging
import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

from swerl.core.contracts import SandboxBackend
from swerl.core.errors import (
    GatewayError,
    SandboxError,
    SandboxFileError,
    SandboxFolderError,
    SandboxLostError,
    SwerlError,
)
from swerl.sandboxes.e2b_server import access, envd, ports
from swerl.sandboxes.e2b_server.connect import off_loop, read_body
from swerl.sandboxes.e2b_server.control import Control
from swerl.sandboxes.e2b_server.envd import PORT, Transfers
from swerl.sandboxes.e2b_server.failure import Code, WireError, as_failure
from swerl.sandboxes.e2b_server.served import ServedSandbox, ServedSandboxes, ServerOptions

_LOG = logging.getLogger(__name__)
_AUDIT = logging.getLogger("swerl.audit")
"""One line a request; refused ones are warnings."""
_BACKLOG = 1024
_SHUTDOWN_S = 5.0
_HOST = re.compile(r"(\d{1,5})-([0-9a-f]{20})(?:-[a-z0-9]+)?\.[^/]+", re.IGNORECASE)
"""`<port>-<id>.<domain>`; old SDKs append a suffix to the id. No machine has such a name."""
_DIRECT_PATHS = frozenset({"/swerl/run", "/swerl/file"})
_FAILED = 409
"""Status of an answer that carries an error of the sandbox."""
_MAX_RUN_BYTES = 1 << 29
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
        self._transfers = Transfers(self._options.max_file_mib << 20)
        self._server = web.Server(
            self._handle, handler_cancellation=True, access_log=None, logger=_no_log()
        )
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        options, loop = self._options, asyncio.get_running_loop()
        tls = access.tls_context(options.certificate) if options.certificate else None
        try:
            if options.socket:
                self._listener = await loop.create_unix_server(
                    self._server, sock=_private_socket(options.socket), backlog=_BACKLOG
                )
                self.url = f"unix:{options.socket}"
                return self
            self._listener = await loop.create_server(
                self._server, options.host, options.port, backlog=_BACKLOG, ssl=tls
            )
        except OSError as error:
            where = options.socket or f"{options.host}:{options.port}"
            raise GatewayError(
                f"cannot listen on {where}: {error.strerror}",
                hint="choose another address, or stop what uses it",
            ) from error
        port = self._listener.sockets[0].getsockname()[1]
        shown = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"{'https' if tls else 'http'}://{shown}:{port}"
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
        if self._options.socket:
            self._options.socket.unlink(missing_ok=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, and write an audit line: the caller, the operation, the result.

        It has no query and no body: those may hold tokens, commands and files.
        """
        status = 499  # the client is gone
        try:
            response = await self._answer(request)
            status = response.status
            return response
        finally:
            to = _target(request.headers)
            level = logging.WARNING if status in (401, 403) else logging.INFO
            # Quoted and cut: a client chooses them.
            texts = request.method, request.path, to.sandbox_id if to else "-"
            _AUDIT.log(level, "%s %.20r %.200r %.60r %d", request.remote, *texts, status)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
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
        to = _target(request.headers)
        if to is not None and to.port != envd.PORT:
            tokens = access.traffic_token_of(request.headers), access.token_of(request.headers)
            served = self._served.open_port_with(to.sandbox_id, *tokens)
            return await ports.relay(served, to.port, request, key=self._key)
        if envd.serves(request.path) and (to is not None or request.path != "/health"):
            served = self._admitted(to.sandbox_id if to else "", request)
            try:
                return await envd.answer(served, request, self._transfers)
            except SandboxLostError as error:
                served.end(from_inside=error.from_inside)
                raise
        if to is not None and self._options.takes_orders and request.path in _DIRECT_PATHS:
            # The sandbox's own token, and not the key: a leaked one opens no other sandbox.
            served = self._served.open_with(to.sandbox_id, access.token_of(request.headers))
            return await _answer_direct(served, request, self._options.max_file_mib << 20)
        access.require_key(request.headers, self._key)
        return await self._control.answer(request)

    def _admitted(self, sandbox_id: str, request: web.BaseRequest) -> ServedSandbox:
        """Return the sandbox that the token or the signed file address opens.

        A signed address may lack the sandbox's id; its signature then identifies the sandbox.
        """
        token = access.token_of(request.headers)
        if token or request.path != "/files" or "signature" not in request.query:
            return self._served.open_with(sandbox_id, token)
        candidates = [self._served.find(sandbox_id)] if sandbox_id else self._served.all()
        operation = "read" if request.method == "GET" else "write"
        for served in filter(None, candidates):
            if access.is_signed(request.query, operation, served.token):
                return served
        message = "the signature of the address is wrong, or it has expired, or its sandbox is gone"
        raise WireError(Code.UNAUTHENTICATED, message)


def _private_socket(path: Path) -> socket.socket:
    """Bind a socket to which only this user may connect; one that nobody serves is replaced."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as served:
            if served.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        path.unlink(missing_ok=True)
        # A mode that is set after the bind would leave a moment for others.
        before = os.umask(0o177)
        try:
            listening.bind(str(path))
        finally:
            os.umask(before)
    except OSError:
        listening.close()
        raise
    return listening


@dataclass(frozen=True, slots=True)
class PortAddress:
    sandbox_id: str
    port: int


def _target(headers: Mapping[str, str]) -> PortAddress | None:
    """Return a request's target: from its host `<port>-<id>.<domain>`, else from headers."""
    if match := _HOST.fullmatch(headers.get("Host", "")):
        return PortAddress(match[2].lower(), int(match[1]))
    sandbox_id = headers.get("E2b-Sandbox-Id", "")
    if not sandbox_id:
        return None
    port = headers.get("E2b-Sandbox-Port", "")
    return PortAddress(sandbox_id, int(port) if re.fullmatch(r"\d{1,5}", port) else PORT)


async def _answer_direct(
    served: ServedSandbox, request: web.BaseRequest, max_file_bytes: int
) -> web.Response:
    try:
        match request.method, request.path:
            case "POST", "/swerl/run":
                asked = await read_body(request, _MAX_RUN_BYTES)
                return await _run(served, await off_loop(len(asked), _arguments, asked))
            case "GET", "/swerl/file":
                return web.Response(body=await served.sandbox.read(request.query["path"]))
            case "PUT", "/swerl/file":
                data = await read_body(request, max_file_bytes)
                await served.sandbox.write(request.query["path"], data)
                return web.Response(status=204)
    except FileNotFoundError as error:
        return _failed({"missing": str(error)})
    except SandboxFileError as error:
        is_folder = isinstance(error, SandboxFolderError)
        known = {"message": str(error), "hint": error.hint, "reason": error.reason}
        return _failed({**known, "is_folder": is_folder})
    except SandboxError as error:
        is_lost = isinstance(error, SandboxLostError)
        if is_lost:
            served.end(from_inside=error.from_inside)
        body = {"message": str(error), "hint": error.hint, "from_inside": error.from_inside}
        return _failed({**body, "lost": is_lost})
    raise WireError(Code.UNIMPLEMENTED, "the method is not allowed here", status=405)


def _arguments(body: bytes) -> dict[str, Any]:
    given: dict[str, Any] = orjson.loads(body)
    stdin = given.get("stdin")
    return {**given, "stdin": None if stdin is None else base64.b64decode(stdin)}


async def _run(served: ServedSandbox, arguments: dict[str, Any]) -> web.Response:
    done = await served.sandbox.run(arguments.pop("argv"), **arguments)

    def packed() -> bytes:
        body = {
            "exit_code": done.exit_code,
            "stdout": base64.b64encode(done.stdout).decode(),
            "stderr": base64.b64encode(done.stderr).decode(),
            "timed_out": done.timed_out,
            "truncated": done.truncated,
            "duration_s": done.duration_s,
        }
        return orjson.dumps(body)

    body = await off_loop(len(done.stdout) + len(done.stderr), packed)
    return web.Response(body=body, content_type="application/json")


def _failed(body: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=_FAILED, content_type="application/json")


def _no_log() -> logging.Logger:
    """Return a silent logger for aiohttp: its own would print headers, and so keys."""
    logger = logging.Logger(f"{__name__}.http")
    logger.addHandler(logging.NullHandler())
    return logger


def raise_file_limit() -> None:
    """Raise the limit of open files: a command needs up to three, and sandboxes run many."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _NUM_FILES:
        wanted = _NUM_FILES if most == resource.RLIM_INFINITY else min(_NUM_FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))
