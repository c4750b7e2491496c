"""Mirroring from one real registry to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import InputError
from swerl.core.image_reference import Target
from swerl.images.mirror import mirror
from tests.unit.images.pulls import Make, Push


async def test_image_arrives_at_second_registry_byte_for_byte(
    registry: Any, start_registry: Make, push: Push, make_image: Make, copy: Make, tmp_path: Path
) -> None:
    image, second = make_image("a", "b"), start_registry()
    await push(image, "swe/task", "v1")
    report = await copy([f"{registry.host}/swe/task:v1"], f"{second.host}/mirror")
    pinned = report.images[0].pinned
    assert pinned.reference == f"{second.host}/mirror/swe/task@{image.manifest.digest}"
    assert report.moved_bytes == sum(len(data) for data in image.blobs.values())
    again = await mirror([pinned.reference], Target(registry.host, "back"), tmp_path / "other.json")
    assert again[0].pinned.digest == image.manifest.digest
    assert second.half_written() == []


async def test_same_registry_mounts_instead_of_moving(
    registry: Any, push: Push, make_image: Make, copy: Make
) -> None:
    await push(make_image("a", "b"), "swe/task")
    report = await copy([f"{registry.host}/swe/task"], f"{registry.host}/copy")
    assert (report.failed, report.moved_bytes) == ([], 0)
    assert registry.half_written() == []


async def test_layer_that_images_share_crosses_once(
    registry: Any, start_registry: Make, push: Push, make_image: Make, copy: Make
) -> None:
    second, names, blobs = start_registry(), [], {}
    for number in range(4):
        image = make_image("shared base", f"own {number}")
        blobs |= image.blobs
        await push(image, f"swe/task{number}")
        names.append(f"{registry.host}/swe/task{number}")
    report = await copy(names, f"{second.host}/m")
    assert len(blobs) == 1 + 4 * 2
    assert report.moved_bytes == sum(map(len, blobs.values()))


async def test_locked_image_keeps_its_digest_when_the_tag_moves(
    registry: Any, start_registry: Make, push: Push, make_image: Make, copy: Make
) -> None:
    old, name = make_image("old"), f"{registry.host}/swe/task"
    await push(old, "swe/task")
    await copy([name], f"{registry.host}/first")
    await push(make_image("new"), "swe/task")
    report = await copy([name], f"{registry.host}/first")
    assert report.images[0].pinned.digest == old.manifest.digest


async def test_two_images_for_one_name_are_refused(copy: Make) -> None:
    with pytest.raises(InputError, match="would both become"):
        await copy(["a.example/swe/task:1", "b.example/swe/task:1"], "127.0.0.1:9/m")
