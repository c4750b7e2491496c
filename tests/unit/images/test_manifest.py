"""Malformed and hostile documents of a registry are one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from swerl.core.errors import ImageError
from swerl.images.manifest import IMAGE_TYPES, INDEX_TYPES, Manifest, declared_type, read_config

DEEP = b"[" * 100_000
DIGEST = "sha256:" + "a" * 64
LAYER = {"digest": DIGEST, "size": 1}


def image(**entry: object) -> bytes:
    return json.dumps({"config": {**LAYER, **entry}, "layers": [LAYER]}).encode()


def blobs(body: bytes) -> object:
    assert declared_type(body) == ""
    return Manifest("a", body, IMAGE_TYPES[0]).blobs()


def choice(body: bytes) -> object:
    return Manifest("a", body, INDEX_TYPES[0]).platform_digest()


def config(body: bytes) -> object:
    return read_config(body, Manifest("a", image(), IMAGE_TYPES[0]))


@pytest.mark.parametrize(
    ("read", "body", "words"),
    [
        *((read, DEEP, "is not JSON") for read in (blobs, choice, config)),
        (blobs, b"\xff", "is not JSON"),
        (blobs, b"{}", "lacks"),
        (blobs, b'{"config": 3, "layers": []}', "is malformed"),
        (blobs, image(size=-5), "negative size"),
        (blobs, image().replace(b": 1", b": 1e400"), "is malformed"),
        (blobs, image(digest="sha256:../../../../etc/passwd"), "not a SHA-256 digest"),
        (choice, b"null", "is not a JSON object"),
        (choice, b'{"manifests": [1]}', "is malformed"),
        (choice, b'{"manifests": []}', "has no image for"),
        (config, b"{}", "missing or malformed field"),
        (config, b'{"rootfs": {"diff_ids": [1]}}', "not a SHA-256 digest"),
        (config, b'{"rootfs": {"diff_ids": []}}', "lists 0 layers, but its manifest 1"),
    ],
)
def test_a_malformed_document_is_refused(
    read: Callable[[bytes], object], body: bytes, words: str
) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        read(body)
    assert caught.value.hint
