"""Serve a site on loopback behind a token in the address; write it as files."""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import permutations
from pathlib import Path

from aiohttp import web

from swerl.core.errors import InputError, SwerlError
from swerl.core.files import disk_errors
from swerl.core.secrets import state_dir
from swerl.rollout import record
from swerl.runs import index
from swerl.runs.index import FoundRun
from swerl.view import evaluations
from swerl.view.evaluations import slug_of
from swerl.view.site import (
    ASSETS,
    GROUPS_A_PAGE,
    TOKENS_A_PAGE,
    Page,
    Site,
    num_pages,
    numbered_path,
)

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
    token = own_token()
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


def own_token() -> str:
    """Return this user's token, so that a link works after the next start, too.

    The file is readable by its owner alone; without a writable folder each start has a new token.
    """
    path, made = state_dir() / "view-token", secrets.token_urlsafe(18)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(path, "x", opener=_private) as file:
            file.write(made)
        kept = path.read_text().strip()
        is_private = path.stat().st_uid == os.getuid() and not path.stat().st_mode & 0o077
        if is_private and re.fullmatch(r"[\w-]{24}", kept, re.ASCII):
            return kept
    return made


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def write(site: Site, output: Path) -> int:
    """Write every page below a folder and return their size in bytes. Raises RunError."""
    size = 0
    for path in _paths(site.folder, tokens=site.has_tokens):
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


def _paths(folder: Path, *, tokens: bool) -> Iterator[str]:
    """Yield the path of every page, with those of tokens if asked for."""
    yield from ("index.html", *ASSETS)
    runs = list(index.find_runs(folder).values())
    if any(map(evaluations.names, runs)):
        yield "evals.html"
    for a, b in permutations(evaluations.compared_evals(runs), 2):
        yield f"r/{slug_of(a[0].name)}/v/{a[1]}/vs/{slug_of(b[0].name)}/{b[1]}.html"
    for run, other in permutations(evaluations.compared_runs(runs), 2):
        yield f"r/{slug_of(run.name)}/with/{slug_of(other.name)}.html"
    for run in runs:
        top = f"r/{slug_of(run.name)}"
        yield f"{top}/index.html"
        yield from (f"{top}/v/{name}.html" for name in evaluations.names(run))
        for stage in run.stages():
            groups = index.groups(run.stage(stage))
            for number in range(1, num_pages(len(groups), GROUPS_A_PAGE) + 1):
                yield f"{top}/s/{numbered_path(stage, number)}"
            for names in groups.values():
                yield from _group_paths(run, stage, names, tokens=tokens)


def _group_paths(run: FoundRun, stage: str, names: Sequence[str], *, tokens: bool) -> Iterator[str]:
    place = f"r/{slug_of(run.name)}/e/{stage}"
    for name in names:
        yield f"{place}/{name}/index.html"
        if tokens:
            yield from _token_paths(run.episode(stage, name), f"{place}/{name}")
    attempts = index.read_attempts(run.stage(stage), names)
    verdicts = {each.name: str(each.summary.get("verdict")) for each in attempts}
    for name, other in permutations(evaluations.compared_attempts(verdicts), 2):
        yield f"{place}/{name}/vs-{other}.html"


def _token_paths(episode: Path, place: str) -> Iterator[str]:
    trajectory, _ = index.part(lambda: record.read_trajectory(episode))
    for turn in trajectory.turns if trajectory else ():
        size = len(turn.prompt_ids) + len(turn.output_ids)
        for part in range(1, num_pages(size, TOKENS_A_PAGE) + 1):
            yield f"{place}/{numbered_path(f't{turn.index + 1}', part)}"
