"""Answer in place of E2B's agent inside a sandbox: health, files, and two Connect services."""

from __future__ import annotations

import asyncio
import base64
import posixpath
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import BodyPartReader, web

from swerl.core.chat import Json
from swerl.core.errors import SandboxError, SandboxLostError, SwerlError
from swerl.sandboxes.e2b_server import access, connect
from swerl.sandboxes.e2b_server.connect import (
    IDLE_S,
    Message,
    RpcStream,
    get_bytes,
    get_integer,
    get_object,
    get_table,
    get_text,
    get_texts,
    read_pieces,
    too_large,
)
from swerl.sandboxes.e2b_server.failure import Code, WireError, as_failure
from swerl.sandboxes.e2b_server.filesystem import resolve
from swerl.sandboxes.e2b_server.processes import CommandEnd, CommandSpec, RunningCommand
from swerl.sandboxes.e2b_server.served import ServedSandbox

PORT = 49983
SERVICES = ("/process.Process/", "/filesystem.Filesystem/")
_REST = ("/files", "/health")
_UNARY = frozenset(
    {f"{SERVICES[0]}{name}" for name in ("List", "SendInput", "CloseStdin", "SendSignal")}
    | {f"{SERVICES[1]}{name}" for name in ("Stat", "MakeDir", "Move", "ListDir", "Remove")}
)
_HEALTH_TIMEOUT_S = 4.0
"""Less than the 5 s that the SDK waits."""
_FILE_NAME = re.compile(r';\s*filename="((?:[^"\\]|\\.)*)"', re.DOTALL)
_PIECE_BYTES = 1 << 16
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, "15": 15, "9": 9}
_MAX_DEPTH = 1000


def serves(path: str) -> bool:
    """Return whether a path belongs to this agent, not to the REST interface."""
    return path in _REST or path.startswith(SERVICES)


async def answer(
    served: ServedSandbox, request: web.BaseRequest, max_file_bytes: int
) -> web.StreamResponse:
    """Answer a request to a sandbox's agent; the caller has checked its rights."""
    match request.method, request.path:
        case "GET", "/health":
            await _require_alive(served)
            return web.Response(status=204)
        case "GET", "/files":
            return await _download(served, request, max_file_bytes)
        case "POST", "/files":
            return _json(await _upload(served, request, max_file_bytes))
        case "POST", "/process.Process/Start":
            call = _Call.read(served, request, await connect.read_one(request))
            return await _stream(call, request)
        case "POST", name if name in _UNARY:
            call = _Call.read(served, request, await connect.read_message(request))
            try:
                async with asyncio.timeout(call.timeout_s):
                    return _json(await _unary(call, name))
            except TimeoutError as error:
                raise _late() from error
    message = f"this server does not serve {request.method} {request.path[:100]}"
    raise WireError(Code.UNIMPLEMENTED, message)


async def _require_alive(served: ServedSandbox) -> None:
    """Raise SandboxLostError if nothing can run in the sandbox any more."""
    try:
        await served.sandbox.run(["true"], cwd="/", timeout_s=_HEALTH_TIMEOUT_S)
    except SandboxLostError:
        raise
    except SandboxError:  # its process limit is reached, so it is alive
        return


async def _download(
    served: ServedSandbox, request: web.BaseRequest, max_bytes: int
) -> web.StreamResponse:
    """Answer with a file, piece by piece."""
    path, user = _file(served, request.query, request.query.get("path", ""))
    async with served.files.reading(path, max_bytes, user) as (size, pieces):
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = size
        await response.prepare(request)
        rest = size
        try:
            async for piece in pieces:
                async with asyncio.timeout(IDLE_S):
                    await response.write(piece[:rest])
                rest -= len(piece[:rest])
        except (TimeoutError, SandboxError) as error:
            raise ConnectionAbortedError("the transfer stalled") from error
        if rest:  # the file was cut short meanwhile
            raise ConnectionAbortedError("the file is incomplete")
        await response.write_eof()
        return response


async def _upload(served: ServedSandbox, request: web.BaseRequest, max_bytes: int) -> list[Json]:
    """Write the files of a request as they arrive; return what was written."""
    if request.content_type == "application/octet-stream":
        path, user = _file(served, request.query, request.query.get("path", ""))
        await served.files.write(path, read_pieces(request, max_bytes), user)
        return [_written(path)]
    if not request.content_type.startswith("multipart/"):
        message = f"content type {request.content_type!r} is neither multipart nor octet-stream"
        raise WireError(Code.INVALID_ARGUMENT, message)
    paths = []
    try:
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or part.name != "file":
                continue
            name = request.query.get("path") or _file_name(part)
            path, user = _file(served, request.query, name)
            if path in paths:
                message = f"the request has two files for {path}; only the first was written"
                raise WireError(Code.INVALID_ARGUMENT, message)
            await served.files.write(path, _part_pieces(part, max_bytes), user)
            paths.append(path)
    except (ValueError, AssertionError) as error:
        raise WireError(Code.INVALID_ARGUMENT, f"cannot read the form: {error}") from error
    return [_written(path) for path in paths]


async def _part_pieces(part: BodyPartReader, max_bytes: int) -> AsyncIterator[bytes]:
    size = 0
    while True:
        try:
            async with asyncio.timeout(IDLE_S):
                piece = await part.read_chunk(_PIECE_BYTES)
        except TimeoutError as error:
            raise WireError(Code.CANCELED, "the file did not arrive", status=408) from error
        size += len(piece)
        if size > max_bytes:
            raise too_large(max_bytes)
        if not piece:
            return
        yield piece


def _file(served: ServedSandbox, query: Mapping[str, str], name: str) -> tuple[str, str | None]:
    """Return a file's absolute path, and the user for whom it is read or written."""
    if not name or "\0" in name:
        raise WireError(Code.INVALID_ARGUMENT, "the request names no file")
    user = access.inside_user(query.get("username", ""))
    return resolve(name, served.home(user)), user


def _file_name(part: BodyPartReader) -> str:
    """Return a part's file name as it was sent: aiohttp's own reader drops a leading slash."""
    if match := _FILE_NAME.search(part.headers.get("Content-Disposition", "")):
        return re.sub(r"\\(.)", r"\1", match[1])
    return part.filename or ""


def _written(path: str) -> Json:
    return {"path": path, "name": posixpath.basename(path), "type": "file"}


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a Connect service."""

    served: ServedSandbox
    user: str | None
    """`root`, or None for the sandbox's ordinary user."""
    message: Message
    timeout_s: float | None
    """Time limit of the client; None for no limit."""
    keepalive_s: float
    """Silence after which a stream sends a keep-alive."""

    @classmethod
    def read(cls, served: ServedSandbox, request: web.BaseRequest, message: Message) -> _Call:
        headers = request.headers
        return cls(
            served=served,
            user=access.user_of(headers),
            message=message,
            timeout_s=connect.timeout_s(headers),
            keepalive_s=connect.keepalive_s(headers),
        )

    def path(self, name: str = "path") -> str:
        return resolve(get_text(self.message, name), self.served.home(self.user))

    def command(self) -> RunningCommand:
        """Return the command that the message selects. Raises WireError, not found."""
        selector = get_object(self.message, "process")
        return self.served.processes.find(get_integer(selector, "pid"))


async def _stream(call: _Call, request: web.BaseRequest) -> web.StreamResponse:
    """Answer with a stream; after the first message an error is sent as the last message."""
    reply = RpcStream(request)
    try:
        await _start(call, reply)
    except SwerlError as error:
        if isinstance(error, SandboxLostError):
            call.served.end()
        return await reply.end(as_failure(error))
    return await reply.end()


async def _start(call: _Call, reply: RpcStream) -> None:
    """Start a command and stream it; at the call's timeout it is killed."""
    if get_object(call.message, "pty"):
        raise WireError(Code.UNIMPLEMENTED, "this server does not serve terminals")
    config = get_object(call.message, "process")
    cmd, env = get_text(config, "cmd"), get_table(config, "envs")
    if not cmd:
        raise WireError(Code.INVALID_ARGUMENT, "the request names no command")
    for name in env:
        if not name or "=" in name:
            raise WireError(Code.INVALID_ARGUMENT, f"{name!r} cannot name a variable")
    spec = CommandSpec(
        argv=[cmd, *get_texts(config, "args")],
        cwd=resolve(get_text(config, "cwd"), call.served.home(call.user)),
        env=env,
        user=call.user,
        takes_input=call.message.get("stdin") is not False,
        timeout_s=call.timeout_s,
    )
    await _follow(await call.served.processes.start(spec), call, reply)


async def _follow(running: RunningCommand, call: _Call, reply: RpcStream) -> None:
    try:
        await reply.send({"event": {"start": {"pid": running.pid}}})
        while True:
            try:
                async with asyncio.timeout(call.keepalive_s):
                    event = await running.receive()
            except TimeoutError:
                await reply.send({"event": {"keepalive": {}}})
                continue
            if isinstance(event, CommandEnd):
                return await reply.send({"event": {"end": event.message()}})
            stream = "stderr" if event.is_stderr else "stdout"
            text = base64.b64encode(event.data).decode()
            await reply.send({"event": {"data": {stream: text}}})
    finally:
        running.leave()


async def _unary(call: _Call, name: str) -> Message:
    """Answer a call that has one message and one answer."""
    files, user = call.served.files, call.user
    match name:
        case "/process.Process/List":
            return {"processes": [running.message() for running in call.served.processes.all()]}
        case "/process.Process/SendInput":
            running, data = call.command(), get_object(call.message, "input")
            if "stdin" not in data:
                raise WireError(Code.UNIMPLEMENTED, "this server serves input as `stdin` only")
            await running.send(get_bytes(data, "stdin"))
        case "/process.Process/CloseStdin":
            await call.command().end_input()
        case "/process.Process/SendSignal":
            running, signal = call.command(), str(call.message.get("signal", ""))
            if signal not in _SIGNALS:
                raise WireError(Code.UNIMPLEMENTED, f"no signal {signal[:40]!r} is served")
            await running.signal(_SIGNALS[signal])
        case "/filesystem.Filesystem/Stat":
            return {"entry": await files.stat(call.path(), user)}
        case "/filesystem.Filesystem/MakeDir":
            await files.make(call.path(), user)
            return {"entry": await files.stat(call.path(), user)}
        case "/filesystem.Filesystem/Move":
            target = call.path("destination")
            await files.move(call.path("source"), target, user)
            return {"entry": await files.stat(target, user)}
        case "/filesystem.Filesystem/ListDir":
            depth = min(get_integer(call.message, "depth") or 1, _MAX_DEPTH)
            return {"entries": await files.listing(call.path(), depth, user)}
        case "/filesystem.Filesystem/Remove":
            await files.remove(call.path(), user)
    return {}


def _late() -> WireError:
    return WireError(Code.DEADLINE_EXCEEDED, "the call exceeded its timeout")


def _json(body: Json | Message) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
