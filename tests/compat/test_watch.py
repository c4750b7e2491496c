"""The proxy passes everything on and counts requests, however they are cut into pieces."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
from aiohttp import web

from tests.compat.watch import CountingProxy, proxy_to


class Echo:
    """A Listener that answers with what it was sent. Stands for a Session."""

    def __init__(self) -> None:
        server = web.Server(self.answer, handler_cancellation=True)
        self.runner = web.ServerRunner(server)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=await request.read())

    async def attach(self, sock: socket.socket) -> None:
        await self.runner.setup()
        await web.SockSite(self.runner, sock).start()


async def test_bodies_pass_whole_and_requests_are_counted_by_path() -> None:
    echo = Echo()
    body = b'{"said": "POST /v1/other HTTP/1.1\\r\\n"}' * 20_000
    async with proxy_to(echo) as proxy, aiohttp.ClientSession() as http:
        url = await proxy.listen()
        for path in ("/v1/messages?beta=true", "/v1/messages"):
            async with http.post(url + path, data=body) as response:
                assert await response.read() == body
        async with http.head(url + "/") as response:
            assert response.status == 200
        assert proxy.requests == {"POST /v1/messages": 2, "HEAD /": 1}
    await echo.runner.cleanup()


async def test_a_first_line_in_two_pieces_is_counted_once() -> None:
    proxy = CountingProxy(0)
    seen = b""
    for piece in (b"GET /v1/mo", b"dels HTTP/1.1\r\nHo", b"st: x\r\n\r\n", b"POST /a HTTP/1.1\r\n"):
        seen = proxy._count(seen + piece)
    assert proxy.requests == {"GET /v1/models": 1, "POST /a": 1}


async def test_a_client_that_leaves_is_noticed_behind_the_proxy() -> None:
    left = asyncio.Event()

    class Waiting(Echo):
        async def answer(self, request: web.BaseRequest) -> web.Response:
            try:
                await asyncio.Event().wait()
            finally:
                left.set()
            return web.Response()

    echo = Waiting()
    async with proxy_to(echo) as proxy:
        host, port = (await proxy.listen()).removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()
        writer.close()
        async with asyncio.timeout(30):
            await left.wait()
    await echo.runner.cleanup()
