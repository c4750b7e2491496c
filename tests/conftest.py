"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .services.fixtures import (  # noqa: F401  known to every test
    base_image,
    docker_image,
    dockerd,
    pushed_image,
    registry,
    run_folder,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of real data beside the checkout; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"real data folder {folder.name}/ is not beside the checkout")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the sandboxes of tests out of the ledger of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERL_STATE", str(tmp_path_factory.mktemp("state")))
        yield
