"""Planning against a real registry on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swerl.images.pull import PullOptions, plan
from swerl.images.store import Store
from tests.unit.images.pulls import Make, Push


async def test_a_shared_layer_counts_once_and_no_manifest_is_fetched_again(
    faulty: Any, push: Push, make_image: Make, store: Store, tmp_path: Path
) -> None:
    pair = make_image("base", "a"), make_image("base", "b")
    for image, name in zip(pair, ("one", "two"), strict=True):
        await push(image, f"swe/{name}")
    names = [f"{faulty.host}/swe/{name}" for name in ("one", "two", "one")] + ["host", "built:x"]
    options = PullOptions(docker_config=tmp_path / "none.json")

    first = await plan(names, store, options=options)
    faulty.asked.clear()
    again = await plan(names, store, options=options)

    sizes = {digest: len(data) for image in pair for digest, data in image.blobs.items()}
    assert (first.num_images, first.num_local, first.num_stored) == (2, 2, 0)
    assert {blob.digest: blob.size for blob in first.missing} == sizes
    assert first.blobs == first.missing
    assert first.pulls == {faulty.host: 2}
    assert again == first
    assert {line.split()[0] for line in faulty.asked} == {"HEAD"}
