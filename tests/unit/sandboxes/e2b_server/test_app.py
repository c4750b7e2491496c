"""The server's own life: it takes its sandboxes with it, and survives what clients do."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from e2b import Sandbox, SandboxException

from swerl.core.contracts import Sandbox as Inside
from swerl.core.errors import ImageError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Limits
from swerl.sandboxes import local

from ..helpers import host_processes
from .helpers import KEY, Service, eventually, serving


def test_stopping_removes_every_sandbox_and_ends_every_stream() -> None:
    ended: list[Exception] = []
    with serving(local.build(local.Options())) as running:
        sandboxes = [Sandbox.create(**running.sdk) for _ in range(3)]
        handle = sandboxes[0].commands.run("echo on; sleep 1234.5", background=True)
        assert next(iter(handle))[0] == "on\n"

        def wait() -> None:
            try:
                handle.wait()
            except (SandboxException, OSError) as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert host_processes("1234.5")
    waiting.join(10)
    assert ended
    assert not host_processes("1234.5")


def test_a_client_that_reads_nothing_harms_nobody(service: Service, sandbox: Sandbox) -> None:
    """Endless output for a socket that nobody reads waits in the sandbox."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    message = {"process": {"cmd": "/bin/bash", "args": ["-c", "yes"]}, "stdin": False}
    data = json.dumps(message).encode()
    with socket.create_connection((host, int(port))) as stuck:
        stuck.sendall(
            b"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\n"
            + f"E2b-Sandbox-Id: {sandbox.sandbox_id}\r\n".encode()
            + f"X-Access-Token: {sandbox._envd_access_token}\r\n".encode()
            + b"Content-Type: application/connect+json\r\n"
            + f"Content-Length: {len(data) + 5}\r\n\r\n".encode()
            + struct.pack(">BI", 0, len(data)) + data
        )  # fmt: skip
        eventually(lambda: sandbox.commands.list())
        assert sandbox.commands.run("echo alive").stdout == "alive\n"
    for info in sandbox.commands.list():
        sandbox.commands.kill(info.pid)


class Failing:
    """A backend whose sandboxes cannot be made, or are lost at once."""

    def __init__(self, error: Exception, *, later: bool = False) -> None:
        self.error = error
        self.later = later

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **_: object) -> AsyncIterator[Inside]:
        if not self.later:
            raise self.error
        yield self  # type: ignore[misc]

    @asynccontextmanager
    async def start(self, argv: Sequence[str], **_: object) -> AsyncIterator[None]:
        raise self.error
        yield

    async def read(self, path: str) -> bytes:
        raise self.error

    async def run(self, argv: Sequence[str], **_: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ImageError("no such image", hint="pull it"), 404),
        (SandboxUnavailableError("no daemon", hint="start it"), 500),
        (ZeroDivisionError("a secret of the inside"), 500),
    ],
)
def test_a_backend_that_cannot_is_told_in_its_words_only_where_they_are_ours(
    error: Exception, status: int
) -> None:
    with (
        serving(Failing(error)) as running,  # type: ignore[arg-type]
        running.client(**{"X-API-Key": KEY}) as client,
    ):
        answer = client.post("/sandboxes", json={"templateID": "base"})
        assert answer.status_code == status
        assert "secret" not in answer.text
        assert client.get("/v2/sandboxes").json() == []


def test_a_sandbox_that_is_lost_is_gone_for_its_client_too() -> None:
    backend = Failing(SandboxLostError("it died", hint="open another"), later=True)
    with serving(backend) as running:  # type: ignore[arg-type]
        for ask in (lambda box: box.commands.run("true"), lambda box: box.files.read("x")):
            sandbox = Sandbox.create(**running.sdk)
            with pytest.raises(SandboxException, match="was not found"):
                ask(sandbox)
            eventually(lambda box=sandbox: not box.is_running())


async def test_a_create_that_is_given_up_makes_nothing_that_stays(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, headers={"X-API-Key": KEY}) as client:

        async def ids() -> set[str]:
            answer = await client.get("/v2/sandboxes")
            return {sandbox["sandboxID"] for sandbox in answer.json()}

        before = await ids()
        asked = asyncio.create_task(client.post("/sandboxes", json={"templateID": "base"}))
        await asyncio.sleep(0.005)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        async with asyncio.timeout(10):
            while await ids() - before:  # noqa: ASYNC110  there is no event
                await asyncio.sleep(0.02)
