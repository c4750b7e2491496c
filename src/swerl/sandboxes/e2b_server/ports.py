"""Requests to a server inside a sandbox, carried by the two streams of a command.

The sandbox has no network to the host. A shell inside connects to the port and copies between the
connection and its own input and output: one shell per request, HTTP only, no upgrades. Requests use
HTTP/1.0, so the answer ends with the connection.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Iterator

from aiohttp import web
from multidict import CIMultiDict

from swerl.core.errors import SandboxError
from swerl.sandboxes.e2b_server.connect import IDLE_S, read_body
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.served import ServedSandbox

_CONNECT = """\
exec 3<>"/dev/tcp/127.0.0.1/$1" || exit
echo
exec 4<&0
cat <&4 >&3 2>/dev/null &
exec cat <&3
"""
"""Prints an empty line once it is connected, and ends with the server's answer."""
_MAX_BODY_BYTES = 64 << 20
_MAX_HEAD_BYTES = 1 << 16
_ONE_HOP = {
    "connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding",
    "upgrade", "content-length",
}  # fmt: skip
_OURS = {"x-access-token", "e2b-traffic-access-token", "e2b-sandbox-id", "e2b-sandbox-port"}
_WITHOUT_BODY = {204, 205, 304}


async def relay(
    served: ServedSandbox, port: int, request: web.BaseRequest, *, key: str
) -> web.StreamResponse:
    """Forward a request to a port inside and stream the answer back.

    No program inside may learn a key or token: headers that hold one are not forwarded.
    """
    body = await read_body(request, _MAX_BODY_BYTES)
    argv = ["bash", "-c", _CONNECT, "bash", str(port)]
    async with served.sandbox.start(argv, cwd="/") as process:
        data = (chunk.data async for chunk in process.output() if not chunk.is_stderr)
        _, rest = await _until(data, b"", b"\n", served, port)
        async with asyncio.timeout(IDLE_S):
            await process.send(
                _head(request, body, (served.token, served.traffic_token, key)) + body
            )
        head, rest = await _until(data, rest, b"\r\n\r\n", served, port)
        response = _response(head)
        response.force_close()  # later bytes from inside must not answer another request
        await response.prepare(request)
        if request.method == "HEAD" or response.status in _WITHOUT_BODY:
            return response
        try:
            async with asyncio.timeout(IDLE_S) as patience:
                await response.write(rest)
                async for piece in data:
                    await response.write(piece)
                    patience.reschedule(asyncio.get_running_loop().time() + IDLE_S)
        except (TimeoutError, SandboxError) as error:  # the status was sent
            raise ConnectionAbortedError("the answer is incomplete") from error
        await response.write_eof()
    return response


async def _until(
    data: AsyncIterator[bytes], begin: bytes, end: bytes, served: ServedSandbox, port: int
) -> tuple[bytes, bytes]:
    """Return the bytes up to `end`, and the bytes after it."""
    while end not in begin:
        piece = await anext(data, None)
        if piece is None or len(begin) > _MAX_HEAD_BYTES:
            message = f"The sandbox is running but port is not open, or does not speak HTTP: {port}"
            raise WireError(Code.UNAVAILABLE, message, status=502, about=served.id)
        begin += piece
    before, _, after = begin.partition(end)
    return before, after


def _head(request: web.BaseRequest, body: bytes, secrets: Collection[str]) -> bytes:
    headers = [
        f"{name}: {value}"
        for name, value in request.headers.items()
        if name.lower() not in _ONE_HOP | _OURS and not any(part in value for part in secrets)
    ]
    length = [f"Content-Length: {len(body)}"] if body or request.method == "POST" else []
    lines = [f"{request.method} {request.raw_path} HTTP/1.0", *headers, *length]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("utf-8", "surrogateescape")


def _response(head: bytes) -> web.StreamResponse:
    status, *lines = head.decode("utf-8", "replace").split("\r\n")
    code = status.split(" ", 2)[1:2]
    if not status.startswith("HTTP/1.") or not code or not re.fullmatch(r"[2-5]\d\d", code[0]):
        raise WireError(Code.UNAVAILABLE, "the server inside does not speak HTTP", status=502)
    return web.StreamResponse(status=int(code[0]), headers=CIMultiDict(_headers(lines)))


def _headers(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() and name.strip().lower() not in _ONE_HOP:
            yield name.strip(), value.strip()
