"""Whole episodes of real agents on docker, e2b and kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from swerl.sandboxes import docker, e2b, kubernetes, local

from ..harnesses.helpers import LIMITS, SOLVED, TASK, Place, built, work
from .e2b_server.helpers import KEY, Service, serving

pytestmark = pytest.mark.agents


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """An E2B-compatible provider, and the backend behind it."""
    pytest.importorskip("e2b", reason="the package `e2b` is not installed")
    monkeypatch.setenv(e2b.KEY, KEY)
    backend = local.build(local.Options())
    with serving(backend, workdir=TASK.workdir, limits=LIMITS) as service:
        yield service


def docker_place(request: pytest.FixtureRequest) -> Place:
    image = request.getfixturevalue("docker_image")
    backend = docker.build(docker.Options(base_url=request.getfixturevalue("dockerd")))
    return lambda _, mounts: backend.open(image, LIMITS, workdir=TASK.workdir, mounts=mounts)


def e2b_place(request: pytest.FixtureRequest) -> Place:
    url = request.getfixturevalue("cloud").url
    backend = e2b.build(e2b.Options(api_url=url, sandbox_url=url))
    return lambda _, mounts: backend.open("base", LIMITS, workdir=TASK.workdir, mounts=mounts)


def pod_place(request: pytest.FixtureRequest) -> Place:
    image = request.getfixturevalue("docker_image")
    options = kubernetes.Options(kubeconfig=str(request.getfixturevalue("kube")[1]), user="agent")
    backend = kubernetes.build(options)
    return lambda _, mounts: backend.open(image, LIMITS, workdir=TASK.workdir, mounts=mounts)


PLACES: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "docker": docker_place,
    "e2b, by relay": e2b_place,
    "a pod": pod_place,
}
CASES = [
    *product(("claude-code", "codex", "mini-swe-agent"), ("docker", "e2b, by relay")),
    ("mini-swe-agent", "a pod"),
]


@pytest.mark.parametrize(("agent", "where"), CASES)
async def test_an_agent_makes_the_gold_edit_and_every_sampled_token_is_trained(
    agent: str, where: str, request: pytest.FixtureRequest
) -> None:
    worked = await work(built(agent), place=PLACES[where](request))
    assert worked.exit.code == 0, worked.exit.log
    assert worked.calc == SOLVED
    worked.assert_trained_whole()
