"""The fixtures that the package's docstring lists."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import image
from .daemon import CannotRunError
from .image import BaseImage
from .shared import locked, shared


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "services"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def dockerd(run_folder: Path) -> Iterator[str]:
    """Base URL of a real dockerd."""
    with _or_skip(), shared("dockerd", run_folder) as address:
        yield address


@pytest.fixture(scope="session")
def registry(run_folder: Path) -> Iterator[str]:
    """Address of a real registry that speaks plain HTTP."""
    with _or_skip(), shared("registry", run_folder) as address:
        yield address


@pytest.fixture(scope="session")
def base_image(run_folder: Path) -> BaseImage:
    """A small image with sh, git and Python, and the user `agent`."""
    folder = run_folder / "image"
    folder.mkdir(exist_ok=True)
    with _or_skip(), locked(run_folder / "image.lock"):
        return image.build(folder)


@pytest.fixture(scope="session")
def docker_image(dockerd: str, base_image: BaseImage, run_folder: Path) -> str:
    """Name of the test image in `dockerd`."""
    docker = pytest.importorskip("docker", reason="the package `docker` is not installed")
    with locked(run_folder / "load.lock"):
        client = docker.DockerClient(base_url=dockerd, timeout=120)
        try:
            if not client.images.list(name=base_image.name):
                client.images.load(base_image.archive.read_bytes())
        finally:
            client.close()
    return base_image.name


@pytest.fixture(scope="session")
def pushed_image(registry: str, base_image: BaseImage, run_folder: Path) -> str:
    """Reference of the test image in `registry`."""
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    reference = f"{registry}/{base_image.name}"
    with locked(run_folder / "push.lock"):
        subprocess.run(
            [
                *("skopeo", "copy", "--quiet", "--dest-tls-verify=false"),
                *(f"oci:{base_image.layout}:1", f"docker://{reference}"),
            ],
            check=True,
            capture_output=True,
        )
    return reference


@contextmanager
def _or_skip() -> Iterator[None]:
    try:
        yield
    except CannotRunError as error:
        pytest.skip(str(error))
