"""Serve a site on loopback behind a token in the address; write it as files."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from swerl.core.errors import InputError, SwerlError
from swerl.core.files import disk_errors
from swerl.rollout import record
from swerl.runs import index
from swerl.view.site import ASSETS, GROUPS_A_PAGE, TOKENS_A_PAGE, Site, num_pages, numbered_path

HOST = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Scripts, styles and connections come from this server only: text of an agent cannot act."""


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
                page = await asyncio.to_thread(site.page, path, dict(request.query))
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


def write(site: Site, output: Path, report: Callable[[], None] = lambda: None) -> int:
    """Write every page below a folder and return their size in bytes. Raises RunError.

    `report` is called after each page.
    """
    size = 0
    for path in _paths(site):
        try:
            page = site.page(path)
        except SwerlError as error:
            page = site.problem(path, error)
        target = output / path
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(page.body)
        size += len(page.body)
        report()
    return size


def _paths(site: Site) -> Iterator[str]:
    """Yield the path of every page, without comparisons, which are too many."""
    yield from ("index.html", "evals.html", *ASSETS)
    for slug, run in site.runs().items():
        top = f"r/{slug}"
        yield f"{top}/index.html"
        if run.is_trained:
            yield f"{top}/tasks.html"
        yield from (f"{top}/v/{name}.html" for name in run.evaluations())
        for stage in run.stages():
            groups = index.groups(run.stage(stage))
            for number in range(1, num_pages(len(groups), GROUPS_A_PAGE) + 1):
                yield f"{top}/s/{numbered_path(stage, number)}"
            for name in (name for names in groups.values() for name in names):
                place = f"{top}/e/{stage}/{name}"
                yield f"{place}/index.html"
                if site.has_tokens:
                    yield from _token_paths(run.episode(stage, name), place)


def _token_paths(episode: Path, place: str) -> Iterator[str]:
    trajectory, _ = index.part(lambda: record.read_trajectory(episode))
    for turn in trajectory.turns if trajectory else ():
        size = len(turn.prompt_ids) + len(turn.output_ids)
        for part in range(1, num_pages(size, TOKENS_A_PAGE) + 1):
            yield f"{place}/{numbered_path(f't{turn.index + 1}', part)}"
