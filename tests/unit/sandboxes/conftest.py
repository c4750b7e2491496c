"""The backends of the conformance suite, and a sandbox of each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from swerl.core.contracts import Sandbox, SnapshotSandbox
from swerl.core.errors import SandboxUnavailableError
from swerl.images.archive import import_image
from swerl.images.store import default_store
from swerl.sandboxes import docker, e2b, kubernetes, local

from . import kube_server
from .helpers import LIMITS, OUTPUT_CAP_BYTES, WORKDIR, Target

NO_QUOTA = "a check every 10 s ends a container that holds more"
E2B_LACKS = {"end of daemons": "a command's daemons run until the sandbox ends"}


def open_stored(request: pytest.FixtureRequest) -> Target:
    """The test image, from its own store."""
    base = request.getfixturevalue("base_image")
    cache = request.getfixturevalue("tmp_path_factory").mktemp("cache")
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setenv("SWERL_CACHE", str(cache))
    asyncio.run(import_image(base.layout, default_store(), base.name))
    return Target(local.build(local.Options()), base.name)


def open_snapshot(request: pytest.FixtureRequest) -> Target:
    """A snapshot of a sandbox of the test image, as the agents of a Task get it."""
    stored = open_stored(request)

    async def take() -> str:
        async with stored.open() as opened:
            assert isinstance(opened, SnapshotSandbox)
            return await opened.snapshot()

    return Target(stored.backend, asyncio.run(take()))


def open_docker(request: pytest.FixtureRequest) -> Target:
    """The test image, from a real dockerd."""
    name = request.getfixturevalue("docker_image")
    url = request.getfixturevalue("dockerd")
    options = docker.Options(base_url=url)
    return Target(docker.build(options), name, {"disk quota": NO_QUOTA})


def open_e2b(request: pytest.FixtureRequest) -> Target:
    url = request.getfixturevalue("e2b_server")
    options = e2b.Options(api_url=url, sandbox_url=url)
    return Target(e2b.build(options), "base", E2B_LACKS)


def open_kubernetes(request: pytest.FixtureRequest) -> Target:
    """The test image, from a stand-in for a cluster whose pods are containers of a real dockerd."""
    name = request.getfixturevalue("docker_image")
    _, path = request.getfixturevalue("kube")
    options = kubernetes.Options(kubeconfig=str(path), user="agent")
    return Target(kubernetes.build(options), name, {"disk quota": "the kubelet evicts the pod"})


TARGETS: dict[str, Callable[[pytest.FixtureRequest], Target]] = {
    "local": lambda _: Target(local.build(local.Options()), "host"),
    "local/oci": open_stored,
    "local/snapshot": open_snapshot,
    "docker": open_docker,
    "e2b": open_e2b,
    "kubernetes": open_kubernetes,
}


@pytest.fixture(autouse=True)
def _little_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swerl.core.sandbox.OUTPUT_CAP_BYTES", OUTPUT_CAP_BYTES)


@pytest.fixture(scope="module")
def backend() -> local.LocalBackend:
    return local.build(local.Options())


UNIT = "local"
"""The target of the unit tests; the others are integration tests."""
SOME_PARTS = ("local/snapshot", "kubernetes")
"""Targets that share code with others; they run the tests of commands, ends and limits alone."""
PARTS = tuple(f"test_conformance_{part}.py" for part in ("commands", "end", "limits"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        spec = getattr(item, "callspec", None)
        target = spec.params.get("target") if spec else None
        if target not in TARGETS or not item.path.name.startswith("test_conformance"):
            continue
        if target in SOME_PARTS and item.path.name not in PARTS:
            item.add_marker(pytest.mark.nightly)
        elif target != UNIT:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    """One backend, and an image for it with sh, Python and git."""
    return TARGETS[request.param](request)


@pytest.fixture(scope="session")
def e2b_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of `swerl sandbox serve` over the backend `local`; its key is in the environment."""
    pytest.importorskip("e2b", reason="the package `e2b` is not installed")
    from .e2b_server.helpers import KEY, serving

    backend = local.build(local.Options())
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(backend, limits=LIMITS, workdir=WORKDIR) as running,
    ):
        patch.setenv("E2B_API_KEY", KEY)
        if not os.access(Path.home(), os.W_OK):  # it keeps what it uploads in a cache
            patch.setenv("SWERL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield running.url


@pytest.fixture(scope="session")
def kube(
    dockerd: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[kube_server.KubeServer, Path]]:
    with kube_server.serving(dockerd, tmp_path_factory.mktemp("kube")) as running:
        yield running


@pytest.fixture
async def sandbox(target: Target) -> AsyncIterator[Sandbox]:
    try:
        async with target.open() as opened:
            yield opened
    except SandboxUnavailableError as error:
        pytest.skip(f"{error}: {error.hint}")


@pytest.fixture
def host_secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a host file that no sandbox may reach."""
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_text("host secret")
    path.chmod(0o644)
    return str(path)
