"""Serve a site on loopback behind a token in the address."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from swerl.core.errors import InputError, SwerlError
from swerl.view.site import Site

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Pages run no script, and styles come from this server only: text of an agent cannot act."""


def application(site: Site, token: str) -> web.Application:
    """Return the application: `/TOKEN/PAGE` is a page, everything else is not found."""
    # Pages share the readers of events, so they are rendered one by one, off the loop.
    turn = asyncio.Lock()

    async def answer(request: web.Request) -> web.Response:
        key, _, path = request.match_info["path"].partition("/")
        if not hmac.compare_digest(key.encode("utf-8", "replace"), token.encode()):
            return web.Response(status=404, text="not found", headers=_HEADERS)
        status = 200
        try:
            async with turn:
                page = await asyncio.to_thread(site.page, path)
        except SwerlError as error:
            page, status = site.problem(path, error), 404
        return web.Response(
            body=page.body, status=status, headers=_HEADERS, content_type=page.type, charset="utf-8"
        )

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app


@asynccontextmanager
async def serving(site: Site, port: int) -> AsyncIterator[str]:
    """Serve during the block; yield the address. Raises InputError if the port is taken."""
    token = secrets.token_urlsafe(18)
    runner = web.AppRunner(application(site, token), access_log=None)
    await runner.setup()
    try:
        listener = web.TCPSite(runner, HOST, port)
        try:
            await listener.start()
        except OSError as error:
            raise InputError(
                f"cannot listen on {HOST}:{port}: {error.strerror}",
                hint="another program has the port; --port 0 chooses a free one",
            ) from error
        yield f"http://{HOST}:{runner.addresses[0][1]}/{token}/"
    finally:
        await runner.cleanup()
