"""A gateway process and its controller where one asks what the other cannot do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import GatewayError
from swerl.engines._process import child as start
from swerl.gateway import remote
from swerl.gateway.pool import GatewayPool
from tests.gateway._fakes import RecordingEngine
from tests.gateway._wire_engine import wired
from tests.gateway.test_app import body, post
from tests.gateway.test_pool import WAIT_S, opened, until
from tests.gateway.test_safety import told


@pytest.fixture
async def deaths() -> asyncio.Queue[str]:
    return asyncio.Queue()


@pytest.fixture
async def pool(tmp_path: Path, deaths: asyncio.Queue[str]) -> AsyncIterator[GatewayPool]:
    async with (
        wired(RecordingEngine()) as wire,
        GatewayPool(wire.setup(tmp_path), num_processes=1, on_death=deaths.put_nowait) as served,
    ):
        yield served


async def test_a_closed_session_takes_no_socket(pool: GatewayPool) -> None:
    session = opened(pool)
    await session.close()
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]

    with pytest.raises(GatewayError, match="closed"):
        async with asyncio.timeout(WAIT_S):
            await session.attach(sock)

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_target_that_is_no_url_is_refused_as_bad_http(pool: GatewayPool) -> None:
    raw = b"POST http://[/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"

    answer = await told(opened(pool), raw, until=b"never")

    assert answer[9:12] == b"400", answer


async def test_a_process_that_could_not_be_started_is_tried_again(
    pool: GatewayPool, deaths: asyncio.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError("no memory for a process")]

    def child(*args: Any, **more: Any) -> AbstractAsyncContextManager[Any]:
        if refusals:
            raise refusals.pop()
        return start(*args, **more)

    monkeypatch.setattr("swerl.gateway.remote.child", child)
    os.kill(opened(pool, "doomed").worker.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        told_of = [await deaths.get() for _ in range(2)]

    assert "no memory for a process" in told_of[1]
    await until(lambda: pool._workers[0].ready.is_set())
    assert (await post(opened(pool, "fresh"), json=body()))[0] == 200


async def test_a_process_waits_for_descriptors(
    pool: GatewayPool, deaths: asyncio.Queue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError("too many open files")]

    def worker(*args: Any, **more: Any) -> remote.Worker:
        if refusals:
            raise refusals.pop()
        return remote.Worker(*args, **more)

    monkeypatch.setattr("swerl.gateway.pool.Worker", worker)
    os.kill(opened(pool, "doomed").worker.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await deaths.get()

    await until(lambda: pool._workers[0].ready.is_set())
    assert (await post(opened(pool, "fresh"), json=body()))[0] == 200
