"""What E2B's agent inside a sandbox would answer: health, files, and two Connect services."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import SandboxError, SandboxLostError, SwerlError
from swerl.sandboxes.e2b_server import access, connect, folder_service, process_service
from swerl.sandboxes.e2b_server.call import Call
from swerl.sandboxes.e2b_server.failure import Code, Failure, as_failure
from swerl.sandboxes.e2b_server.fields import Message

if TYPE_CHECKING:
    from swerl.sandboxes.e2b_server.boxes import Box
    from swerl.sandboxes.e2b_server.transfer import Transfers

VERSION = "0.5.7"
"""Of envd, as told to the SDK: uploads as plain bytes, no metadata on files."""
PORT = 49983
_HEALTH_TIMEOUT_S = 4.0
"""Below the 5 s that the SDK waits."""
_UNARY: Mapping[str, Callable[[Call], Awaitable[Message]]] = {
    "/process.Process/List": process_service.list_all,
    "/process.Process/SendInput": process_service.send_input,
    "/process.Process/SendSignal": process_service.send_signal,
    "/process.Process/CloseStdin": process_service.close_stdin,
    "/process.Process/Update": process_service.update,
    "/filesystem.Filesystem/Stat": folder_service.stat,
    "/filesystem.Filesystem/MakeDir": folder_service.make_dir,
    "/filesystem.Filesystem/Move": folder_service.move,
    "/filesystem.Filesystem/ListDir": folder_service.list_dir,
    "/filesystem.Filesystem/Remove": folder_service.remove,
    "/filesystem.Filesystem/CreateWatcher": folder_service.create_watcher,
    "/filesystem.Filesystem/GetWatcherEvents": folder_service.get_watcher_events,
    "/filesystem.Filesystem/RemoveWatcher": folder_service.remove_watcher,
}
_STREAMS: Mapping[str, Callable[[Call, connect.Reply], Awaitable[None]]] = {
    "/process.Process/Start": process_service.start,
    "/process.Process/Connect": process_service.connect,
    "/filesystem.Filesystem/WatchDir": folder_service.watch_dir,
}
_STREAM_INPUT = "/process.Process/StreamInput"
SERVICES = ("/process.Process/", "/filesystem.Filesystem/")
_REST = ("/files", "/envs", "/metrics", "/health")


def serves(path: str) -> bool:
    """Tell whether a path is one of this agent's, and not of the REST interface."""
    return path in _REST or path.startswith(SERVICES)


async def answer(box: Box, request: web.BaseRequest, transfers: Transfers) -> web.StreamResponse:
    """Answer a request to a sandbox's agent; who sent it may do so."""
    path, method = request.path, request.method
    if path in _REST:
        return await _answer_rest(box, request, transfers)
    if method != "POST":
        raise Failure(Code.UNIMPLEMENTED, f"{path} is asked by POST", status=405)
    if path in _STREAMS:
        return await _answer_stream(box, request)
    if path == _STREAM_INPUT:
        return await _answer_input(box, request)
    if path in _UNARY:
        call = _call(box, request, await connect.read_message(request))
        return _json(await _in_time(call, _UNARY[path](call)))
    raise Failure(Code.UNIMPLEMENTED, f"there is no call {path[:100]}", status=404)


async def _answer_rest(
    box: Box, request: web.BaseRequest, transfers: Transfers
) -> web.StreamResponse:
    match request.method, request.path:
        case "GET", "/health":
            await _require_alive(box)
            return web.Response(status=204)
        case "GET", "/files":
            return await transfers.download(box, request)
        case "POST", "/files":
            return _json(await transfers.upload(box, request))
        case "GET", "/envs":
            return _json(dict(box.wish.env))
        case "GET", "/metrics":
            message = "the backend does not measure what its sandboxes use"
            raise Failure(Code.UNIMPLEMENTED, message)
    raise Failure(Code.UNIMPLEMENTED, "the method is not allowed here", status=405)


async def _require_alive(box: Box) -> None:
    """Raise SandboxLostError where nothing can run in the sandbox any more."""
    try:
        await box.sandbox.run(["true"], cwd="/", timeout_s=_HEALTH_TIMEOUT_S)
    except SandboxLostError:
        raise
    except SandboxError:  # it is full of processes, and so alive
        return


async def _answer_stream(box: Box, request: web.BaseRequest) -> web.StreamResponse:
    """Answer with a stream; from its first message on, a failure is its last."""
    call = _call(box, request, await connect.read_one(request))
    reply = connect.Reply(request)
    try:
        await _STREAMS[request.path](call, reply)
    except SwerlError as error:
        return await reply.end(_told(box, error))
    return await reply.end()


async def _answer_input(box: Box, request: web.BaseRequest) -> web.StreamResponse:
    call = _call(box, request, {})
    reply = connect.Reply(request)
    try:
        work = process_service.stream_input(call, connect.read_stream(request))
        await reply.send(await _in_time(call, work))
    except SwerlError as error:
        return await reply.end(_told(box, error))
    return await reply.end()


async def _in_time(call: Call, work: Awaitable[Message]) -> Message:
    """Return what the work returns within the time that its client gives it."""
    try:
        async with asyncio.timeout(call.timeout_s):
            return await work
    except TimeoutError as error:
        message = "the call ran into its timeout"
        raise Failure(Code.DEADLINE_EXCEEDED, message) from error


def _told(box: Box, error: SwerlError) -> Failure:
    if isinstance(error, SandboxLostError):
        box.end(from_inside=error.from_inside)
    return as_failure(error)


def _call(box: Box, request: web.BaseRequest, message: Message) -> Call:
    return Call(
        box=box,
        user=access.user_of(request.headers),
        message=message,
        timeout_s=connect.timeout_s(request.headers),
        keepalive_s=connect.keepalive_s(request.headers),
    )


def _json(body: Json | Message) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
