"""A proxy before a provider that fails as real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

import aiohttp
from aiohttp import web

_DROPPED = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}

Answer = Callable[[web.BaseRequest], "web.Response | str | None"]
"""The handling of a request: this answer, `lose` the real answer, `drop` the request, or pass it on
unchanged (None)."""


class Faults:
    """Passes requests on to a provider, with the faults that the test sets."""

    def __init__(self, upstream: str) -> None:
        self.url = ""
        self.answer: Answer = lambda _: None
        self.creates = 0
        self._upstream = upstream
        self._streams: set[asyncio.Transport] = set()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(auto_decompress=False)
        self._server = web.Server(self._handle, access_log=None)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._server, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        await self._server.shutdown(0.1)
        await self._http.close()

    def cut(self) -> int:
        """Break every answer in progress; return their number."""
        streams, self._streams = self._streams, set()
        for transport in streams:
            transport.abort()
        return len(streams)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.creates += is_create(request)
        what = self.answer(request)
        if isinstance(what, web.Response):
            return what
        if what == "drop":
            assert request.transport
            request.transport.abort()
            raise asyncio.CancelledError
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _DROPPED}
        body = await request.content.read()
        url = self._upstream + request.path_qs
        async with self._http.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as got:
            if what == "lose":
                await got.read()
                assert request.transport
                request.transport.abort()
                raise asyncio.CancelledError
            return await self._pass_back(request, got)

    async def _pass_back(
        self, request: web.BaseRequest, got: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        headers = {k: v for k, v in got.headers.items() if k.lower() not in _DROPPED}
        response = web.StreamResponse(status=got.status, headers=headers)
        await response.prepare(request)
        assert isinstance(request.transport, asyncio.Transport)
        self._streams.add(request.transport)
        try:
            async for piece in got.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        finally:
            self._streams.discard(request.transport)
        return response


def is_create(request: web.BaseRequest) -> bool:
    """Return whether this requests a new sandbox."""
    return request.method == "POST" and request.path.rstrip("/").endswith("/sandboxes")


def once(answer: Answer, times: int = 1) -> Answer:
    """Apply this to the first creates, and pass the rest on."""
    left = [times]

    def choose(request: web.BaseRequest) -> web.Response | str | None:
        if is_create(request) and left[0] > 0:
            left[0] -= 1
            return answer(request)
        return None

    return choose


def failing(status: int, message: str = "no") -> Answer:
    """Answer with a status and a message, as the provider does."""
    return lambda _: web.json_response({"code": status, "message": message}, status=status)
