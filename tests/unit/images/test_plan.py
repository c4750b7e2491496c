"""Planning against a real registry on loopback, and one that counts pulls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swerl.images.http import Patience, RegistryOptions
from swerl.images.plan import plan
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


async def test_a_second_plan_asks_for_no_manifest_again(
    faulty: Any, push: Push, make_image: Make, store: Store, options: RegistryOptions
) -> None:
    await push(make_image("a"), "swe/one")
    first = await plan([f"{faulty.host}/swe/one"], store, options=options)
    faulty.asked.clear()

    again = await plan([f"{faulty.host}/swe/one"], store, options=options)

    assert again == first
    assert {line.split()[0] for line in faulty.asked} == {"HEAD"}
