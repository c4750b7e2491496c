"""Hostile documents of a registry are one clear error."""

from __future__ import annotations

import pytest

from swerl.core.errors import ImageError
from swerl.images.manifest import IMAGE_TYPES, INDEX_TYPES, Manifest, declared_type, read_config

DEEP = b"[" * 100_000
DIGEST = "sha256:" + "a" * 64
IMAGE = b'{"config": {"digest": "%s", "size": 1}, "layers": []}' % DIGEST.encode()


@pytest.mark.parametrize("body", [DEEP, b"{}", b"[]", IMAGE.replace(b": 1", b": 1e400"), b"\xff"])
def test_a_hostile_manifest_is_refused(body: bytes) -> None:
    with pytest.raises(ImageError):
        Manifest("a", body, IMAGE_TYPES[0]).blobs()
    assert declared_type(body) == ""


@pytest.mark.parametrize("body", [DEEP, b'{"manifests": [1]}', b'{"manifests": []}', b"null"])
def test_a_hostile_index_is_refused(body: bytes) -> None:
    with pytest.raises(ImageError):
        Manifest("a", body, INDEX_TYPES[0]).platform_digest()


@pytest.mark.parametrize("body", [DEEP, b"{}", b'{"rootfs": {"diff_ids": [1]}}'])
def test_a_hostile_config_is_refused(body: bytes) -> None:
    with pytest.raises(ImageError):
        read_config(body, Manifest("a", IMAGE, IMAGE_TYPES[0]))
