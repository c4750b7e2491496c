"""What tests of pulls share: their types, and how a pull that failed is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from swerl.core.errors import ImageError
from swerl.images.pull import Pulled
from swerl.images.store import Store

Push = Callable[..., Awaitable[None]]
Make = Callable[..., Any]
Bring = Callable[..., Awaitable[list[Pulled]]]


def failure(done: list[Pulled]) -> str:
    """The one error of a pull, with its hint."""
    (error,) = [each.error for each in done if each.error]
    assert isinstance(error, ImageError)
    assert error.hint
    return f"{error} | {error.hint}"


def cut_once(faulty: Any) -> Any:
    """Answer the next request by half a blob and a broken connection."""

    async def half(request: web.Request, body: bytes) -> web.StreamResponse:
        faulty.answers.clear()
        response = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    return half


def leftovers(store: Store) -> list[Path]:
    """What a failed pull should not leave: names, half blobs, half layers, unpacked layers."""
    folders = ("names", "work", "layers")
    return [path for name in folders for path in (store.root / name).glob("*")]
