"""Whole episodes of real agents on docker, e2b and kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from swerl.core.contracts import Harness, Sandbox
from swerl.core.sandbox import Mount
from swerl.sandboxes import docker, e2b, kubernetes, local

from ..harnesses.helpers import LIMITS, SOLVED, TASK, Place, built, work
from .e2b_server.helpers import KEY, Service, serving
from .kube_server import KubeServer

pytestmark = pytest.mark.agents

AGENTS = ("claude-code", "codex", "mini-swe-agent")


@pytest.fixture(scope="module", params=AGENTS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """A real agent in its default release; skips where it cannot be had."""
    return built(request.param)


@dataclass(frozen=True, slots=True)
class Cloud:
    """An E2B-compatible provider, and the backend behind it."""

    service: Service

    def open(self, mounts: Sequence[Mount]) -> AbstractAsyncContextManager[Sandbox]:
        url = self.service.url
        options = e2b.Options(api_url=url, sandbox_url=url)
        return e2b.build(options).open("base", LIMITS, workdir=TASK.workdir, mounts=mounts)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    pytest.importorskip("e2b", reason="the package `e2b` is not installed")
    monkeypatch.setenv(e2b.KEY, KEY)
    backend = local.build(local.Options())
    with serving(backend, workdir=TASK.workdir, limits=LIMITS) as service:
        yield Cloud(service)


def docker_place(request: pytest.FixtureRequest) -> Place:
    image = request.getfixturevalue("docker_image")
    backend = docker.build(docker.Options(base_url=request.getfixturevalue("dockerd")))
    return lambda _, mounts: backend.open(image, LIMITS, workdir=TASK.workdir, mounts=mounts)


def e2b_place(request: pytest.FixtureRequest) -> Place:
    cloud = request.getfixturevalue("cloud")
    return lambda _, mounts: cloud.open(mounts)


PLACES: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "docker": docker_place,
    "e2b, by relay": e2b_place,
}


@pytest.mark.parametrize("where", PLACES)
async def test_an_agent_makes_the_gold_edit_and_every_sampled_token_is_trained(
    harness: Harness, where: str, request: pytest.FixtureRequest
) -> None:
    worked = await work(harness, place=PLACES[where](request))
    assert worked.exit.code == 0, worked.exit.log
    assert worked.calc == SOLVED
    worked.assert_trained_whole()


async def test_an_agent_works_in_a_pod(kube: tuple[KubeServer, Path], docker_image: str) -> None:
    options = kubernetes.Options(kubeconfig=str(kube[1]), user="agent")
    backend = kubernetes.build(options)
    worked = await work(
        built("mini-swe-agent"),
        place=lambda _, mounts: backend.open(
            docker_image, LIMITS, workdir=TASK.workdir, mounts=mounts
        ),
    )
    assert worked.calc == SOLVED
    worked.assert_trained_whole()
