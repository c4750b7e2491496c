"""Writing answers over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from swerl.core.chat import Json

if TYPE_CHECKING:
    from swerl.core.contracts import WireReply

PING = b": ping\n\n"
"""A comment: every reader of server-sent events skips it."""


async def send(request: web.BaseRequest, reply: WireReply) -> web.StreamResponse:
    """Send a whole answer. Raises ConnectionError where the client is gone."""
    headers = {**reply.headers, **_request_id()}
    response = web.Response(status=reply.status, headers=headers, body=reply.body)
    await response.prepare(request)
    await response.write_eof()
    return response


async def send_json(request: web.BaseRequest, value: Json) -> web.StreamResponse:
    """Send a JSON answer."""
    response = web.Response(
        body=orjson.dumps(value), content_type="application/json", headers=_request_id()
    )
    await response.prepare(request)
    await response.write_eof()
    return response


class EventStream:
    """Server-sent events. Raises ConnectionError where the client is gone."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def started(self) -> bool:
        """Whether the status line is out; from there on an error is an event."""
        return self._response is not None

    async def ping(self) -> None:
        """Show the client that the answer is still being made."""
        await (await self._open()).write(PING)

    async def finish(self, events: Iterable[bytes]) -> web.StreamResponse:
        """Send the events, all in one piece, and end the stream."""
        response = await self._open()
        await response.write(b"".join(events))
        await response.write_eof()
        return response

    async def fail(self, error: WireReply) -> web.StreamResponse:
        """End the stream with an error event."""
        return await self.finish([b"event: error\ndata: " + error.body + b"\n\n"])

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            headers |= _request_id()
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        return self._response


def _request_id() -> dict[str, str]:
    """Name a request, in the headers where the vendors' clients look; they show it in errors."""
    name = f"req_{uuid.uuid4().hex}"
    return {"request-id": name, "x-request-id": name}
