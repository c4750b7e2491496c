"""Snapshots by name at `swerl sandbox serve`: for its key, apart from those of the SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from e2b import AsyncSandbox, Sandbox

from swerl.core.errors import ImageError, SandboxError
from swerl.images.store import default_store
from swerl.sandboxes import docker, local
from swerl.sandboxes.e2b import E2BBackend

from ..e2b_faults import Faults
from ..e2b_server.helpers import KEY, Service, serving
from ..helpers import LIMITS, WORKDIR
from .provider import backend


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A server whose template is a folder, so that its sandboxes can be kept."""
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "image").mkdir()
    templates = {"base": f"dir:{tmp_path}/image"}
    settings = {"templates": templates, "workdir": WORKDIR, "max_sandboxes": 2}
    with serving(local.build(local.Options()), **settings) as running:
        yield running
    assert not default_store().snapshots(), "they end with the server"


async def take(client: E2BBackend, name: str, word: bytes = b"") -> str:
    async with client.open("base", LIMITS, workdir=WORKDIR) as sandbox:
        await sandbox.write(f"{WORKDIR}/word", word or name.encode())
        return await sandbox.snapshot(name)


async def test_a_name_keeps_its_snapshot_and_the_newest_used_stay(kept: Service) -> None:
    client = backend(kept.url)
    first, again = await take(client, "a"), await take(client, "a", b"other")
    assert first == again == await client.find_snapshot("a")
    async with client.open(first, LIMITS, workdir=WORKDIR) as sandbox:
        assert await sandbox.read(f"{WORKDIR}/word") == b"a"
    await take(client, "b")
    await client.find_snapshot("a")
    await take(client, "c")
    found = [bool(await client.find_snapshot(name)) for name in "abc"]
    assert found == [True, False, True] and len(default_store().snapshots()) == 2
    await client.drop_snapshot("a")
    assert not await client.find_snapshot("a")
    with pytest.raises(ImageError, match="prepared snapshot is gone"):
        async with client.open(first, LIMITS, workdir=WORKDIR):
            pass


async def test_clients_of_the_sdk_neither_see_nor_remove_them(kept: Service) -> None:
    reference = await take(backend(kept.url), "a")
    assert not await AsyncSandbox.list_snapshots(**kept.sdk).next_items()  # type: ignore[arg-type]
    for guess in ("a", "swerl-prepared-", "swerl-prepared-a"):
        with pytest.raises(Exception, match="404"):
            await AsyncSandbox.create(guess, **kept.sdk)  # type: ignore[arg-type]
    for name in ("a", reference):
        assert not await AsyncSandbox.delete_snapshot(name, **kept.sdk)  # type: ignore[arg-type]
    sandbox = await AsyncSandbox.create(**kept.sdk)  # type: ignore[arg-type]
    await sandbox.create_snapshot(name="a")
    assert await backend(kept.url).find_snapshot("a") == reference
    await sandbox.kill()  # type: ignore[call-overload]


@pytest.mark.parametrize("own", [False, True])
def test_only_the_key_takes_finds_and_drops_them(kept: Service, own: bool) -> None:
    with serving(local.build(local.Options()), takes_orders=True) as other:
        service = other if own else kept
        sandbox = Sandbox.create(timeout=60, **service.sdk)  # type: ignore[arg-type]
        token = str(sandbox._envd_access_token)
        requests = [
            ("POST", "/swerl/identity"),
            ("GET", "/swerl/snapshots?name=a"),
            ("DELETE", "/swerl/snapshots?name=a"),
            ("GET", f"/swerl/sandboxes/{sandbox.sandbox_id}/snapshot"),
            ("POST", f"/swerl/sandboxes/{sandbox.sandbox_id}/snapshot?name=a"),
        ]
        inside = {"X-Access-Token": token, "E2b-Sandbox-Id": sandbox.sandbox_id}
        for headers in ({}, inside, {"X-API-Key": token}, {"X-API-Key": KEY[::-1]}):
            with service.client(**headers) as client:
                codes = [client.request(method, path).status_code for method, path in requests]
            assert codes == [401] * 5
        sandbox.kill()


async def test_the_identity_is_that_of_the_image_that_a_create_call_gets(
    kept: Service, tmp_path: Path
) -> None:
    by_name, by_key = backend(kept.url), backend(kept.url, image_key="image")
    first = await by_name.identify("base")
    assert first and first == await by_key.identify("base")
    for refused in (f"dir:{tmp_path}/image", "no/such:1", ""):
        assert await by_name.identify(refused) == ""
    (tmp_path / "image/new").touch()
    assert await by_name.identify("base") not in ("", first)


@pytest.mark.parametrize("status", [200, 404, 501])
async def test_a_server_without_them_is_asked_once(faults: Faults, status: int) -> None:
    asked = []

    def answer(request: web.BaseRequest) -> web.Response | None:
        if not request.path.startswith("/swerl"):
            return None
        asked.append(request.path)
        return web.Response(text="<html>", status=status)

    faults.answer, client = answer, backend(faults.url)
    found = await asyncio.gather(*(client.identify("base") for _ in range(4)))
    assert found == [""] * 4 and await client.find_snapshot("a") == ""
    async with client.open("base", LIMITS, workdir=WORKDIR) as sandbox:
        with pytest.raises(SandboxError, match="takes no snapshots"):
            await sandbox.snapshot()
    assert asked == ["/swerl/snapshots"]


@pytest.mark.parametrize("status", [0, 502])
async def test_an_answer_that_fails_is_not_remembered(kept: Service, status: int) -> None:
    async with Faults(kept.url) as faults:
        client = backend(faults.url)
        faults.answer = lambda _: web.Response(status=status) if status else "drop"
        assert await client.identify("base") == ""
        faults.answer = lambda _: None
        assert await client.identify("base")


async def test_no_file_of_the_client_is_in_a_snapshot_of_a_container(
    dockerd: str, docker_image: str
) -> None:
    containers = docker.build(docker.Options(base_url=dockerd, may_pull=False))
    with serving(containers, templates={"base": docker_image}, workdir="/repo") as running:
        client = backend(running.url)
        async with client.open("base", LIMITS, workdir="/repo") as sandbox:
            for user in (None, "root"):
                await sandbox.run(["true"], user=user)
            await sandbox.write("/new", b"x" * 100_000)
            reference = await sandbox.snapshot("a")
        async with containers.open(
            running.server._served.prepared.find(reference).image,  # type: ignore[union-attr]
            LIMITS,
            workdir="/repo",
        ) as sandbox:
            assert len(await sandbox.read("/new")) == 100_000
            assert ".swerl" not in (await sandbox.run(["ls", "-A", "/tmp"])).text
