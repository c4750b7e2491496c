"""Answer in place of E2B's agent inside a sandbox: health, files, and two Connect services."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext

import orjson
from aiohttp import BodyPartReader, web

from swerl.core.chat import Json
from swerl.core.errors import SandboxError, SandboxLostError, SwerlError
from swerl.sandboxes.e2b_server import access, connect, services
from swerl.sandboxes.e2b_server.access import named_user
from swerl.sandboxes.e2b_server.connect import IDLE_S, Made, Message, off_loop, read_body
from swerl.sandboxes.e2b_server.failure import Code, WireError, as_failure
from swerl.sandboxes.e2b_server.folders import resolve
from swerl.sandboxes.e2b_server.served import ServedSandbox
from swerl.sandboxes.e2b_server.services import Reply, RpcCall

VERSION = "0.5.7"
"""The version of envd that the SDK sees: this one uploads plain bytes, without file metadata."""
PORT = 49983
_HEALTH_TIMEOUT_S = 4.0
"""Less than the 5 s that the SDK waits."""
_UNARY: Mapping[str, Callable[[RpcCall], Awaitable[Reply]]] = {
    "/process.Process/List": services.list_all,
    "/process.Process/SendInput": services.send_input,
    "/process.Process/SendSignal": services.send_signal,
    "/process.Process/CloseStdin": services.close_stdin,
    "/process.Process/Update": services.update,
    "/filesystem.Filesystem/Stat": services.stat,
    "/filesystem.Filesystem/MakeDir": services.make_dir,
    "/filesystem.Filesystem/Move": services.move,
    "/filesystem.Filesystem/ListDir": services.list_dir,
    "/filesystem.Filesystem/Remove": services.remove,
    "/filesystem.Filesystem/CreateWatcher": services.create_watcher,
    "/filesystem.Filesystem/GetWatcherEvents": services.get_watcher_events,
    "/filesystem.Filesystem/RemoveWatcher": services.remove_watcher,
}
_STREAMS: Mapping[str, Callable[[RpcCall, connect.RpcStream], Awaitable[None]]] = {
    "/process.Process/Start": services.start,
    "/process.Process/Connect": services.connect,
    "/filesystem.Filesystem/WatchDir": services.watch_dir,
}
_STREAM_INPUT = "/process.Process/StreamInput"
SERVICES = ("/process.Process/", "/filesystem.Filesystem/")
_REST = ("/files", "/envs", "/metrics", "/health")
_FILE_NAME = re.compile(r';\s*filename="((?:[^"\\]|\\.)*)"', re.DOTALL)
_READS_AT_ONCE = 8
_LARGE_UPLOADS_AT_ONCE = 16
"""Files held in memory while they arrive, over all sandboxes."""
_SMALL_BYTES = 1 << 20
"""Uploads up to this size do not wait for others."""
_SLICE_BYTES = 1 << 20


def serves(path: str) -> bool:
    """Return whether a path belongs to this agent, not to the REST interface."""
    return path in _REST or path.startswith(SERVICES)


async def answer(
    served: ServedSandbox, request: web.BaseRequest, transfers: Transfers
) -> web.StreamResponse:
    """Answer a request to a sandbox's agent; the caller has checked its rights."""
    path, method = request.path, request.method
    if path in _REST:
        return await _answer_rest(served, request, transfers)
    if method != "POST":
        raise WireError(Code.UNIMPLEMENTED, f"{path} requires POST", status=405)
    if path in _STREAMS:
        return await _answer_stream(served, request)
    if path == _STREAM_INPUT:
        return await _answer_input(served, request)
    if path in _UNARY:
        call = _call(served, request, await connect.read_message(request))
        return _json(await _in_time(call, _UNARY[path](call)))
    raise WireError(Code.UNIMPLEMENTED, f"there is no call {path[:100]}", status=404)


async def _answer_rest(
    served: ServedSandbox, request: web.BaseRequest, transfers: Transfers
) -> web.StreamResponse:
    match request.method, request.path:
        case "GET", "/health":
            await _require_alive(served)
            return web.Response(status=204)
        case "GET", "/files":
            return await transfers.download(served, request)
        case "POST", "/files":
            return _json(await transfers.upload(served, request))
        case "GET", "/envs":
            return _json(dict(served.created.env))
        case "GET", "/metrics":
            raise WireError(Code.UNIMPLEMENTED, "the backend does not measure its sandboxes")
    raise WireError(Code.UNIMPLEMENTED, "the method is not allowed here", status=405)


async def _require_alive(served: ServedSandbox) -> None:
    """Raise SandboxLostError if nothing can run in the sandbox any more."""
    try:
        await served.sandbox.run(["true"], cwd="/", timeout_s=_HEALTH_TIMEOUT_S)
    except SandboxLostError:
        raise
    except SandboxError:  # its process limit is reached, so it is alive
        return


async def _answer_stream(served: ServedSandbox, request: web.BaseRequest) -> web.StreamResponse:
    """Answer with a stream; after the first message an error is sent as the last message."""
    call = _call(served, request, await connect.read_one(request))
    reply = connect.RpcStream(request)
    try:
        await _STREAMS[request.path](call, reply)
    except SwerlError as error:
        return await reply.end(_wire_error(served, error))
    return await reply.end()


async def _answer_input(served: ServedSandbox, request: web.BaseRequest) -> web.StreamResponse:
    call = _call(served, request, {})
    reply = connect.RpcStream(request)
    try:
        work = services.stream_input(call, connect.read_stream(request))
        await reply.send(await _in_time(call, work))
    except SwerlError as error:
        return await reply.end(_wire_error(served, error))
    return await reply.end()


async def _in_time(call: RpcCall, work: Awaitable[Made]) -> Made:
    """Return the result of the work within the client's time limit."""
    try:
        async with asyncio.timeout(call.timeout_s):
            return await work
    except TimeoutError as error:
        raise WireError(Code.DEADLINE_EXCEEDED, "the call exceeded its timeout") from error


def _wire_error(served: ServedSandbox, error: SwerlError) -> WireError:
    if isinstance(error, SandboxLostError):
        served.end(from_inside=error.from_inside)
    return as_failure(error)


def _call(served: ServedSandbox, request: web.BaseRequest, message: Message) -> RpcCall:
    return RpcCall(
        served=served,
        user=access.user_of(request.headers),
        message=message,
        timeout_s=connect.timeout_s(request.headers),
        keepalive_s=connect.keepalive_s(request.headers),
    )


def _json(body: Json | Reply) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")


class Transfers:
    """Transfers files, a limited number at once; drops clients that stall."""

    def __init__(self, max_file_bytes: int) -> None:
        self._max_bytes = max_file_bytes
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self._large_uploads = asyncio.Semaphore(_LARGE_UPLOADS_AT_ONCE)

    async def download(self, served: ServedSandbox, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with a file's bytes."""
        path = _path(served, request.query, request.query.get("path", ""))
        async with self._reads:
            data = await served.sandbox.read(path)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(data)
        await response.prepare(request)
        for start in range(0, len(data), _SLICE_BYTES):
            try:
                async with asyncio.timeout(IDLE_S):
                    await response.write(memoryview(data)[start : start + _SLICE_BYTES])
            except TimeoutError as error:
                raise ConnectionAbortedError("the client accepts no more data") from error
        await response.write_eof()
        return response

    async def upload(self, served: ServedSandbox, request: web.BaseRequest) -> list[Json]:
        """Write the files of a request; return what was written."""
        length = request.content_length
        is_small = length is not None and length <= _SMALL_BYTES
        async with nullcontext() if is_small else self._large_uploads:
            if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits for it
            if request.content_type == "application/octet-stream":
                path = _path(served, request.query, request.query.get("path", ""))
                await _write(served, request, path, await read_body(request, self._max_bytes))
                return [_written(path)]
            if request.content_type.startswith("multipart/"):
                return await self._upload_parts(served, request)
        message = f"content type {request.content_type!r} is neither multipart nor octet-stream"
        raise WireError(Code.INVALID_ARGUMENT, message)

    async def _upload_parts(self, served: ServedSandbox, request: web.BaseRequest) -> list[Json]:
        paths: list[str] = []
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader) or part.name != "file":
                    continue
                path = _path(served, request.query, request.query.get("path") or _file_name(part))
                if path in paths:
                    message = f"the request has two files for {path}; only the first was written"
                    raise WireError(Code.INVALID_ARGUMENT, message)
                await _write(served, request, path, await self._read_part(part))
                paths.append(path)
                await asyncio.sleep(0)  # a small file is written at once, and there may be many
        except (ValueError, AssertionError) as error:
            raise WireError(Code.INVALID_ARGUMENT, f"cannot read the form: {error}") from error
        return [_written(path) for path in paths]

    async def _read_part(self, part: BodyPartReader) -> bytes:
        body = bytearray()
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    chunk = await part.read_chunk(1 << 16)
            except TimeoutError as error:
                raise WireError(Code.CANCELED, "the file did not arrive", status=408) from error
            if not chunk:
                return await off_loop(len(body), bytes, body)
            body += chunk
            await asyncio.sleep(0)  # others come between buffered pieces
            if len(body) > self._max_bytes:
                message = f"the file is larger than {self._max_bytes} bytes"
                raise WireError(Code.RESOURCE_EXHAUSTED, message, status=413)


async def _write(served: ServedSandbox, request: web.BaseRequest, path: str, data: bytes) -> None:
    """Write a file. Outside of their own folders, make it writable for the ordinary user."""
    await served.sandbox.write(path, data)
    user = named_user(request.query.get("username", ""))
    if user is None and not path.startswith((f"{served.workdir}/", "/tmp/")):
        await served.folders.give(path)


def _path(served: ServedSandbox, query: Mapping[str, str], given: str) -> str:
    if not given or "\0" in given:
        raise WireError(Code.INVALID_ARGUMENT, "the request names no file")
    return resolve(given, served.home(named_user(query.get("username", ""))))


def _file_name(part: BodyPartReader) -> str:
    """Return a part's file name as it was sent: aiohttp's own reader drops a leading slash."""
    if match := _FILE_NAME.search(part.headers.get("Content-Disposition", "")):
        return re.sub(r"\\(.)", r"\1", match[1])
    return part.filename or ""


def _written(path: str) -> Json:
    return {"path": path, "name": posixpath.basename(path), "type": "file"}
