"""Conformance of every sandbox backend: listeners exposed inside."""

from __future__ import annotations

import asyncio

import pytest

from swerl.core.contracts import Sandbox

from .helpers import GREETED, Echo, Target


async def test_listeners_of_two_sandboxes_do_not_mix(target: Target) -> None:
    async with (
        target.open() as one,
        target.open() as two,
    ):
        for sandbox, name in ((one, "one"), (two, "two")):
            listener = Echo(name.encode())
            url = await sandbox.expose(listener)
            assert url.startswith("http://127.0.0.1:")
            done = await sandbox.run(["python3", "-c", GREETED, url], timeout_s=10)
            assert done.stdout.decode() == f"{name}\n", done
            listener.server.close()


async def test_one_sandbox_accepts_several_listeners(sandbox: Sandbox) -> None:
    listeners = [Echo(b"first"), Echo(b"second")]
    urls = [await sandbox.expose(listener) for listener in listeners]
    assert len(set(urls)) == 2
    for url, listener in zip(urls, listeners, strict=True):
        done = await sandbox.run(["python3", "-c", GREETED, url], timeout_s=10)
        assert done.stdout.strip() == listener.name, done
        listener.server.close()


async def test_an_exposed_port_is_not_open_on_the_host(sandbox: Sandbox) -> None:
    listener = Echo(b"inside only")
    url = await sandbox.expose(listener)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    listener.server.close()
