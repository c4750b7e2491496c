"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swerl.cli import _output

from .services.fixtures import (  # noqa: F401  known to every test
    base_image,
    docker_image,
    dockerd,
    pushed_image,
    registry,
    run_folder,
)

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("/", "/tmp", "/var/tmp", "/dev/shm", "/etc", "/usr", "/opt", "/run", "/root", "/home")
"""Folders of the machine that no test may change the mode or owner of."""

PROGRAMS = {
    "base_image",
    "docker_image",
    "dockerd",
    "kube",
    "pushed_image",
    "ray_cluster",
    "registry",
}
"""Fixtures that start a program of others."""
NIGHTLY = ("redteam", "attacks", "compat")
"""Folders of the nightly shelf."""
collect_ignore = [] if os.environ.get("SWERL_NIGHTLY") else [*NIGHTLY]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test on its shelf: unit (no mark), integration or nightly."""
    for item in items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in NIGHTLY:
            item.add_marker(pytest.mark.nightly)
        needs = PROGRAMS.intersection(getattr(item, "fixturenames", ()))
        if folder == "integration" or needs or item.get_closest_marker("agents"):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of real data beside the checkout; tests that need it skip where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"real data folder {folder.name}/ is not beside the checkout")
    return folder


@pytest.fixture(autouse=True)
def _host_as_it_was() -> Iterator[None]:
    """Fail the test that changes who may use the machine's own folders, and mend it."""
    before = {place: Path(place).stat() for place in MACHINES if Path(place).is_dir()}
    yield
    changed = []
    for place, was in before.items():
        found = Path(place).stat()
        if (found.st_mode, found.st_uid, found.st_gid) != (was.st_mode, was.st_uid, was.st_gid):
            changed.append(f"{place} became {found.st_mode:o}")
            with suppress(PermissionError):
                os.chown(place, was.st_uid, was.st_gid)
                Path(place).chmod(was.st_mode & 0o7777)
    assert not changed


@pytest.fixture(autouse=True)
def _prints_text() -> None:
    """Undo the `--json` and the consoles of a command that an earlier test ran in this process."""
    _output.keep_stdout_for_json(False)
    _output.stdout.cache_clear()
    _output.stderr.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Let commands that tests start hear SIGINT, also where the run itself is a background job."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the sandboxes of tests out of the ledger of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERL_STATE", str(tmp_path_factory.mktemp("state")))
        yield
