"""Sandboxes of images that are not there yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.errors import ImageError
from swerl.core.sandbox import Limits
from swerl.images import owners
from swerl.images.ondemand import OnDemand
from swerl.images.pull import PullOptions
from swerl.images.store import Store
from tests.unit.images.layers import Make, Push


class Opener:
    """A backend that finds images in a store and opens nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **_: Any) -> AsyncIterator[Sandbox]:
        found = image if image == "host" else self._store.find(image).digest
        yield cast(Sandbox, found)


@pytest.fixture
def backend(store: Store, tmp_path: Path) -> Callable[..., OnDemand]:
    def make(**settings: Any) -> OnDemand:
        inner = cast(SandboxBackend, Opener(store))
        options = PullOptions(docker_config=tmp_path / "none.json")
        return OnDemand(inner, store, options=options, **settings)

    return make


async def opened(backend: OnDemand, image: str) -> str:
    async with backend.open(image, Limits(), workdir="/") as sandbox:
        return str(sandbox)


async def test_a_missing_image_is_pulled_once_for_all_callers(
    faulty: Any, push: Push, make_image: Make, backend: Callable[..., OnDemand]
) -> None:
    image = make_image("a")
    await push(image, "swe/task")
    used = backend()
    found = await asyncio.gather(*(opened(used, f"{faulty.host}/swe/task") for _ in range(8)))
    assert set(found) == {image.manifest.digest}
    assert sum(line.startswith("GET") and "manifests" in line for line in faulty.asked) == 1


async def test_a_failed_pull_fails_all_callers_and_is_retried_later(
    faulty: Any, push: Push, make_image: Make, backend: Callable[..., OnDemand]
) -> None:
    await push(make_image("a"), "swe/task")
    faulty.answers["/manifests/latest"] = lambda *_: web.Response(status=404)
    used, name = backend(), f"{faulty.host}/swe/task"
    found = await asyncio.gather(*(opened(used, name) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(each, ImageError) for each in found)
    assert len(faulty.asked) == 1
    faulty.answers.clear()
    assert await opened(used, name)


async def test_waiter_that_gives_up_stops_no_other(
    registry: Any, push: Push, make_image: Make, backend: Callable[..., OnDemand]
) -> None:
    await push(make_image("a"), "swe/task")
    used, name = backend(), f"{registry.host}/swe/task"
    first = asyncio.create_task(opened(used, name))
    second = asyncio.create_task(opened(used, name))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert first.cancelled()


async def test_open_sandbox_keeps_its_image_in_use(
    registry: Any, push: Push, make_image: Make, backend: Callable[..., OnDemand], store: Store
) -> None:
    image = make_image("a")
    await push(image, "swe/task")
    async with backend().open(f"{registry.host}/swe/task", Limits(), workdir="/"):
        with owners.locked(store.root, exclusive=True):
            assert image.manifest.digest in owners.used(store.root)


async def test_local_images_pass_by(backend: Callable[..., OnDemand], store: Store) -> None:
    assert await opened(backend(), "host") == "host"
    assert not store.root.exists()
