"""Direct requests to a run's own server: the same sandbox, without a supervisor in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxLostError, SandboxUnavailableError
from swerl.sandboxes import e2b, local
from swerl.sandboxes._e2b import direct, runner
from swerl.sandboxes._e2b.sdk import CutError, E2BAccess, E2BProvider
from swerl.sandboxes.e2b_server import access

from ..e2b_server.helpers import KEY, Service, serving
from ..helpers import LIMITS, WORKDIR, processes, until


@asynccontextmanager
async def _opened(service: Service, fingerprint: str = "") -> AsyncIterator[Any]:
    urls = {"api_url": service.url, "sandbox_url": service.url}
    options = e2b.Options(**urls, fingerprint=fingerprint, boot_timeout_s=60)
    async with e2b.connect(options, KEY, own=True).open("host", LIMITS, workdir=WORKDIR) as sandbox:
        yield sandbox


@pytest.fixture
async def own() -> AsyncIterator[Sandbox]:
    with serving(local.build(local.Options()), takes_orders=True) as service:
        async with _opened(service) as sandbox:
            yield sandbox


async def test_a_command_receives_and_prints_every_byte(own: Sandbox) -> None:
    every = bytes(range(256)) * 5000
    script = 'cat; printf "\\377" >&2; exit "$CODE"'
    argv = ["sh", "-c", script]
    done = await own.run(argv, stdin=every, env={"CODE": "7"}, user="root", cwd="/")
    assert (done.exit_code, done.stdout, done.stderr) == (7, every, b"\xff")
    left = await own.run(["sh", "-c", "ls -d /tmp/.swerl-* 2>/dev/null; pwd"])
    assert left.stdout.decode() == f"{WORKDIR}\n"


async def test_files_are_read_and_written_whole(own: Sandbox) -> None:
    every = bytes(range(256)) * 5000
    await own.write("/tmp/new folder/ü?&", every)
    assert await own.read("/tmp/new folder/ü?&") == every
    with pytest.raises(FileNotFoundError):
        await own.read("/tmp/none")


async def test_a_command_whose_caller_is_cancelled_is_killed(own: Sandbox) -> None:
    running = asyncio.create_task(own.run(["sleep", "671"]))
    await until(own, "sleep 671", 1)
    running.cancel()
    await asyncio.wait([running])
    await until(own, "sleep 671", 0)
    done = await own.run(["sleep", "672"], timeout_s=0.3)
    assert (done.exit_code, done.timed_out) == (124, True)
    assert await processes(own, "sleep 672") == 0


async def test_a_sandbox_that_its_server_removed_is_lost() -> None:
    with serving(local.build(local.Options()), takes_orders=True) as service:
        async with _opened(service) as sandbox:
            with service.client(**{"X-API-Key": KEY}) as client:
                assert client.delete(f"/sandboxes/{sandbox.id}").status_code == 204
            with pytest.raises(SandboxLostError, match="is gone") as error:
                await sandbox.run(["true"])
            assert not error.value.from_inside


@pytest.fixture(params=["unix", "tls"])
def private(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Service, str]]:
    """A server that no other user, or nobody on the network, can listen to; its fingerprint."""
    ways, fingerprint = {"socket": tmp_path / "socket"}, ""
    if request.param == "tls":
        ways = {"certificate": tmp_path / "new" / "server.pem"}
        access.make_certificate(ways["certificate"])
        fingerprint = access.fingerprint_of(ways["certificate"])
    with serving(local.build(local.Options()), takes_orders=True, **ways) as service:
        yield service, fingerprint
    assert not (tmp_path / "socket").exists()


async def test_a_private_server_is_used_like_any_other(private: tuple[Service, str]) -> None:
    every = bytes(range(256)) * 5000
    async with _opened(*private) as sandbox:
        done = await sandbox.run(["cat"], stdin=every)
        await sandbox.write("/tmp/file", every)
        await asyncio.gather(*(sandbox.run(["true"]) for _ in range(8)))
        async with sandbox.start(["sh", "-c", "read word; echo $word"]) as process:
            await process.send(b"streamed\n")
            streamed = b"".join([chunk.data async for chunk in process.output()])

        assert (done.exit_code, done.stdout, streamed) == (0, every, b"streamed\n")
        assert await sandbox.read("/tmp/file") == every


async def test_only_the_user_of_a_private_server_can_open_its_files(
    private: tuple[Service, str], tmp_path: Path
) -> None:
    files = [*tmp_path.glob("socket"), *tmp_path.glob("new/*")]

    assert [oct(path.stat().st_mode & 0o777) for path in files] == ["0o600"]


async def test_a_server_with_another_certificate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.pem"
    access.make_certificate(path)
    with serving(local.build(local.Options()), certificate=path) as service:
        with pytest.raises(SandboxUnavailableError, match="another one") as refused:
            async with _opened(service, "sha256:" + "0" * 64):
                pass
        with pytest.raises(httpx.HTTPError):
            await asyncio.to_thread(httpx.get, service.url.replace("https", "http") + "/health")

    assert access.fingerprint_of(path) in str(refused.value)


async def test_direct_requests_need_the_sandboxs_token_and_a_server_of_the_run(
    service: Service,
) -> None:
    file = "/swerl/file?path=/etc/hostname"
    with serving(local.build(local.Options()), takes_orders=True) as taking:
        async with _opened(taking) as sandbox:
            name, own = {"E2b-Sandbox-Id": sandbox.id}, {"X-Access-Token": sandbox._remote.token}
            with taking.client(**name) as stranger, taking.client() as lost:
                assert stranger.get(file).status_code == 401
                assert lost.get(file, headers={"X-API-Key": KEY}).status_code == 404
                assert stranger.get(file, headers={"X-API-Key": KEY}).status_code == 401
                assert stranger.get(file, headers=own).status_code != 401
    with service.client(**{"X-API-Key": KEY, "E2b-Sandbox-Id": "0" * 20}) as client:
        assert client.get(file).status_code == 404


async def test_a_server_that_is_stopped_delays_no_file_and_no_command_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It accepts connections and answers nothing, as a process after SIGSTOP does."""
    monkeypatch.setattr(direct, "_FILE_S", 0.2)
    monkeypatch.setattr(runner, "_GRACE_S", 0.0)
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    way = E2BAccess(KEY, url, url, None, 1.0)
    async with asyncio.timeout(60), direct.open_direct(way, "s", "token") as own:
        with pytest.raises(CutError):
            await own.read("/x")
        with pytest.raises(CutError):
            await own.write("/x", b"")
        remote: Any = SimpleNamespace(id="s")
        running = runner.Runner(E2BProvider(way), remote, lifetime_s=0.1)
        command = own.run(["x"], cwd="/", env=None, user=None, timeout_s=None, stdin=None)
        with pytest.raises(SandboxLostError, match=r"its lifetime of 0\.1 s is over") as lost:
            await running.unless_lost(command)
    assert not lost.value.from_inside
    silent.close()
