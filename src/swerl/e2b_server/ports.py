"""Requests to a server that runs inside a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swerl.e2b_server.failure import Code, Failure

if TYPE_CHECKING:
    from aiohttp import web

    from swerl.e2b_server.boxes import Box


async def relay(box: Box, port: int, request: web.BaseRequest) -> web.StreamResponse:
    """Pass a request on to a port inside."""
    message = f"The sandbox is running but port is not open: {port}"
    raise Failure(Code.UNAVAILABLE, message, status=502, about=box.id)
