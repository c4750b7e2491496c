"""Pulling from registries that misbehave: one clear error, or another try."""

from __future__ import annotations

import os
from typing import Any

import pytest
from aiohttp import web

from swerl.images.manifest import IMAGE_TYPES
from swerl.images.store import Store
from tests.unit.images.pulls import Bring, Make, Push, cut_once, failure, leftovers


def status(code: int, **headers: str) -> Any:
    return lambda *_: web.Response(status=code, headers=headers)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _, body: web.Response(body=b"x" * len(body)), "sent content that does not match"),
        (lambda _, body: web.Response(body=body[: len(body) // 2]), "bytes of swe/task@"),
        (lambda _, body: web.Response(body=body * 2), "sent more than"),
        (lambda _, body: web.Response(body=b""), "sent 0 of"),
        (status(404), "has no swe/task@"),
        (status(401), "docker login"),
        (status(403), "docker login"),
        (status(429), "limits the rate of requests"),
        (status(500), "answered 500"),
    ],
    ids=["bytes", "half", "more", "nothing", "404", "401", "403", "429", "500"],
)
async def test_blob_that_cannot_be_had_is_one_clear_error(
    faulty: Any, push: Push, make_image: Make, bring: Bring, store: Store, fault: Any, words: str
) -> None:
    image = make_image("a", "b")
    await push(image, "swe/task")
    faulty.answers[image.layers[1]] = fault
    assert words in failure(await bring(f"{faulty.host}/swe/task", workers=1))
    assert not (store.root / "names").exists()
    assert [*(store.root / "work").iterdir()] == []
    faulty.answers.clear()
    (healed,) = await bring(f"{faulty.host}/swe/task")
    assert healed.stored is not None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (status(404), "has no swe/task:latest"),
        (status(401), "docker login"),
        (status(429), "limits the rate of requests"),
        (status(502), "answered 502"),
        (lambda *_: web.Response(body=b"{", content_type=IMAGE_TYPES[0]), "is not JSON"),
        (lambda *_: web.Response(text="<html>", content_type="text/html"), "text/html"),
        (lambda *_: web.Response(body=bytes(5 << 20)), "larger than 4 MiB"),
    ],
    ids=["404", "401", "429", "502", "no JSON", "page", "huge"],
)
async def test_manifest_that_cannot_be_had_is_one_clear_error(
    faulty: Any, push: Push, make_image: Make, bring: Bring, store: Store, fault: Any, words: str
) -> None:
    await push(make_image("a"), "swe/task")
    faulty.answers["/manifests/latest"] = fault
    assert words in failure(await bring(f"{faulty.host}/swe/task"))
    assert leftovers(store) == []


async def test_manifest_of_another_digest_is_refused(
    faulty: Any, push: Push, make_image: Make, bring: Bring
) -> None:
    image = make_image("a")
    await push(image, "swe/task")
    faulty.answers[image.manifest.digest] = lambda _, body: web.Response(body=body + b" ")
    done = await bring(f"{faulty.host}/swe/task@{image.manifest.digest}")
    assert "sent content that does not match" in failure(done)


@pytest.mark.parametrize("until", ["0", "soon"])
async def test_rate_limit_is_waited_out_as_long_as_asked(
    faulty: Any, push: Push, make_image: Make, bring: Bring, until: str
) -> None:
    await push(make_image("a"), "swe/task")

    def busy(*_: Any) -> web.StreamResponse:
        faulty.answers.clear()
        return web.Response(status=429, headers={"Retry-After": until})

    faulty.answers["/manifests/latest"] = busy
    (done,) = await bring(f"{faulty.host}/swe/task")
    assert done.stored is not None


async def test_broken_connection_is_tried_again(
    faulty: Any, push: Push, bring: Bring, make_image: Make
) -> None:
    image = make_image(os.urandom(300_000).hex())
    await push(image, "swe/task")
    faulty.answers[image.layers[0]] = cut_once(faulty)
    (done,) = await bring(f"{faulty.host}/swe/task")
    assert done.stored is not None
    assert sum(image.layers[0] in line for line in faulty.asked) == 2
