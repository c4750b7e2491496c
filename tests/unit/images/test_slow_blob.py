"""A blob that never ends is given up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from swerl.core.errors import ImageError
from swerl.images import registry
from swerl.images.http import http_session
from swerl.images.manifest import Blob


async def test_a_blob_of_one_byte_now_and_then_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_PATIENCE_S", 0.3)

    async def dribble(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2_000):
            await response.write(b"x")
            await asyncio.sleep(0.02)
        return response

    async with RawTestServer(dribble) as server, http_session() as http:
        host = f"127.0.0.1:{server.port}"
        client = registry.Registry(host, http, tmp_path / "none.json")
        with pytest.raises(ImageError, match="does not answer") as caught:
            async with asyncio.timeout(20):
                async for _ in client.blob("swe/task", Blob("sha256:" + "a" * 64, 2_000)):
                    pass

    assert caught.value.retryable
