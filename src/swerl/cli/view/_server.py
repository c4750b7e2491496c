"""Serve a site on loopback behind a token in the address; write it as files."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.cli.view._site import Page, Site
from swerl.core.errors import InputError, SwerlError
from swerl.core.files import disk_errors

if TYPE_CHECKING:
    from aiohttp import web

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""No script, style or connection that is not ours: the text of an agent can do nothing."""


def application(site: Site, token: str) -> web.Application:
    """Return the application: `/TOKEN/PAGE` is a page, everything else is not found."""
    from aiohttp import web

    # Pages share the readers of events, so they are rendered one by one, off the loop.
    turn = asyncio.Lock()

    async def answer(request: web.Request) -> web.Response:
        given, _, path = request.match_info["path"].partition("/")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
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
    from aiohttp import web

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


def write(site: Site, output: Path, *, tokens: bool) -> int:
    """Write every page below a folder and return their size in bytes. Raises RunError."""
    size = 0
    for path in site.paths(tokens=tokens):
        try:
            page: Page = site.page(path)
        except SwerlError as error:
            page = site.problem(path, error)
        target = output / path
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(page.body)
        size += len(page.body)
    return size
