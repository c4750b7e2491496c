"""Planning against a real registry on loopback, and one that counts pulls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from swerl.images.http import Patience, RegistryOptions
from swerl.images.plan import ImagePlan, PlannedImage, plan
from swerl.images.registry import Quota
from swerl.images.store import Store

Push = Callable[..., Awaitable[None]]
Make = Callable[..., Any]


@pytest.fixture
def options(tmp_path: Path) -> RegistryOptions:
    patience = Patience(tries=2, first_wait_s=0.001)
    return RegistryOptions(docker_config=tmp_path / "none.json", patience=patience)


async def test_a_layer_that_images_share_counts_once(
    registry: Any, push: Push, make_image: Make, store: Store, options: RegistryOptions
) -> None:
    one, two = make_image("base", "a"), make_image("base", "b")
    await push(one, "swe/one")
    await push(two, "swe/two")
    names = [f"{registry.host}/swe/{name}" for name in ("one", "two")]

    made = await plan([*names, names[0], "host", "built:x"], store, options=options)

    sizes = {digest: len(data) for image in (one, two) for digest, data in image.blobs.items()}
    assert len(made.images) == 2
    assert made.num_local == 2
    assert made.unique_bytes == made.missing_bytes == sum(sizes.values())
    assert made.num_pulls(registry.host) == 2
    assert [image.digest for image in made.images] == [one.manifest.digest, two.manifest.digest]


async def test_an_index_is_reduced_to_this_machines_image(
    registry: Any, push: Push, make_image: Make, make_index: Make, store: Store,
    options: RegistryOptions, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("swerl.images.plan.machine_platform", lambda: ("linux", "arm64"))
    amd, arm = make_image("amd"), make_image("arm")
    for image, tag in ((amd, "amd"), (arm, "arm")):
        await push(image, "swe/one", tag)
    both = make_index(amd64=amd.manifest, arm64=arm.manifest)
    await push(type(amd)({}, both), "swe/one", "v1")

    made = await plan([f"{registry.host}/swe/one:v1"], store, options=options)

    assert made.images[0].digest == arm.manifest.digest


async def test_a_second_plan_asks_for_no_manifest_again(
    faulty: Any, push: Push, make_image: Make, store: Store, options: RegistryOptions
) -> None:
    await push(make_image("a"), "swe/one")
    first = await plan([f"{faulty.host}/swe/one"], store, options=options)
    faulty.asked.clear()

    again = await plan([f"{faulty.host}/swe/one"], store, options=options)

    assert again == first
    assert {line.split()[0] for line in faulty.asked} == {"HEAD"}


async def test_an_image_that_is_missing_stops_no_other(
    registry: Any, push: Push, make_image: Make, store: Store, options: RegistryOptions
) -> None:
    await push(make_image("a"), "swe/one")
    told: list[PlannedImage] = []
    names = [f"{registry.host}/swe/{name}" for name in ("gone", "one")]

    made = await plan(names, store, options=options, on_done=told.append)

    (failed,) = made.failed
    assert failed.image == names[0]
    assert "has no swe/gone" in str(failed.error)
    assert made.num_pulls(registry.host) == 1
    assert {image.image for image in told} == set(names)


async def test_a_quota_is_read_and_reported_in_time(
    faulty: Any, push: Push, make_image: Make, store: Store, options: RegistryOptions
) -> None:
    image = make_image("a")
    await push(image, "swe/one")

    def limited(_: web.Request, body: bytes) -> web.Response:
        headers = {"RateLimit-Limit": "100;w=21600", "RateLimit-Remaining": "0;w=21600"}
        kind = image.manifest.media_type
        return web.Response(body=body, headers={**headers, "Content-Type": kind})

    faulty.answers["/manifests/latest"] = limited

    made = await plan([f"{faulty.host}/swe/one"], store, options=options)

    assert made.quotas == {faulty.host: Quota(100, 0, 21600)}
    assert made.quota_s(faulty.host) == 21600


@pytest.mark.parametrize(
    ("num_pulls", "remaining", "windows"), [(5, 5, 0), (6, 5, 1), (105, 5, 1), (106, 5, 2)]
)
def test_whole_windows_of_a_quota_are_waited_for(
    num_pulls: int, remaining: int, windows: int
) -> None:
    images = tuple(PlannedImage(str(number), "hub") for number in range(num_pulls))
    made = ImagePlan(images, frozenset(), {"hub": Quota(100, remaining, 60)})
    assert made.quota_s("hub") == windows * 60
