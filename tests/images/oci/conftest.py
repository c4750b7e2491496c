"""Fixtures of the tests that unpack layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.images.oci.unpack import Unpacked, unpack
from tests.images.oci.layers import Entry, layer_file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    return path


@pytest.fixture
def run(tmp_path: Path, tree: Path) -> Callable[..., Unpacked]:
    """Unpack a layer of these entries into `tree`."""

    def call(*entries: Entry) -> Unpacked:
        file, diff_id = layer_file(tmp_path / "layer.tar.gz", *entries)
        return unpack(file, tree, diff_id)

    return call
