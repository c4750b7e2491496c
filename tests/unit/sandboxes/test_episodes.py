"""Whole episodes of real agents on every backend, over every route to the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swerl.core.changes import edits
from swerl.core.contracts import Harness, Listener, Sandbox
from swerl.core.sandbox import Mount
from swerl.core.turn import Completion, Sampling
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.server import Gateway
from swerl.sandboxes import docker, e2b, kubernetes, local
from swerl.sandboxes._relay import open_relay

from ..harnesses.agents import AGENTS as KNOWN_AGENTS
from ..harnesses.agents import Agent
from ..harnesses.helpers import LIMITS, PATCH, SOLVED, TASK, Place, built, work
from .e2b_faults import Faults
from .e2b_server.helpers import KEY, Service, serving
from .kube_server import KubeServer
from .public_route import PUBLIC_PORT, WithRoute

pytestmark = pytest.mark.agents

AGENTS = ("claude-code", "codex", "mini-swe-agent")
AGENTS_OF_ALL_KINDS = [
    agent for agent in KNOWN_AGENTS if agent.name in ("builtin", "claude-code", "mini-swe-agent")
]
"""One that lives outside the sandbox, a program of its own, and one with a Python of ours."""
AWAY_S, REQUEST_TIMEOUT_S = 6, 2


@pytest.fixture(scope="module", params=AGENTS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """A real agent in its default release; skips where it cannot be had."""
    return built(request.param)


@dataclass(frozen=True, slots=True)
class Cloud:
    """An E2B-compatible provider, and the backend behind it."""

    service: Service
    routed: WithRoute

    def open(
        self,
        gateway: Gateway,
        mounts: Sequence[Mount],
        *,
        way: str,
        url: str = "",
        request_timeout_s: float = 60.0,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox; `url` leads to the provider by a detour."""
        is_public, url = way == "public", url or self.service.url
        self.routed.port = int(gateway.url.rpartition(":")[2]) if is_public else 0
        public = f"http://127.0.0.1:{PUBLIC_PORT}" if is_public else ""
        options = e2b.Options(
            api_url=url,
            sandbox_url=url,
            way=way,
            public_url=public,
            request_timeout_s=request_timeout_s,
        )
        return e2b.build(options).open("base", LIMITS, workdir=TASK.workdir, mounts=mounts)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    pytest.importorskip("e2b", reason="the package `e2b` is not installed")
    monkeypatch.setenv(e2b.KEY, KEY)
    routed = WithRoute(local.build(local.Options()))
    with serving(routed, workdir=TASK.workdir, limits=LIMITS) as service:
        yield Cloud(service, routed)


class ByRelay:
    """A sandbox whose way back is the relay, whatever its backend would choose."""

    def __init__(self, sandbox: Sandbox, closing: AsyncExitStack) -> None:
        self._sandbox = sandbox
        self._closing = closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def expose(self, listener: Listener) -> str:
        relay = open_relay(self._sandbox, listener, on_lost=logging.error)
        return await self._closing.enter_async_context(relay)


def local_place(_: pytest.FixtureRequest) -> Place:
    backend = local.build(local.Options())
    return lambda _, mounts: backend.open("host", LIMITS, workdir=TASK.workdir, mounts=mounts)


def local_relay_place(request: pytest.FixtureRequest) -> Place:
    inner = local_place(request)

    @asynccontextmanager
    async def opened(gateway: Gateway, mounts: Sequence[Mount]) -> AsyncIterator[Sandbox]:
        async with AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(inner(gateway, mounts))
            yield ByRelay(sandbox, stack)

    return opened


def docker_place(request: pytest.FixtureRequest) -> Place:
    image = request.getfixturevalue("docker_image")
    backend = docker.build(docker.Options(base_url=request.getfixturevalue("dockerd")))
    return lambda _, mounts: backend.open(image, LIMITS, workdir=TASK.workdir, mounts=mounts)


def e2b_place(request: pytest.FixtureRequest, way: str) -> Place:
    cloud = request.getfixturevalue("cloud")
    return lambda gateway, mounts: cloud.open(gateway, mounts, way=way)


PLACES: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "local": local_place,
    "local, by relay": local_relay_place,
    "docker": docker_place,
    "e2b, by relay": lambda request: e2b_place(request, "relay"),
    "e2b, by public URL": lambda request: e2b_place(request, "public"),
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


async def test_broken_streams_do_not_disturb_an_agent(harness: Harness, cloud: Cloud) -> None:
    async with Faults(cloud.service.url) as faults:
        cuts = [0]

        async def cut() -> None:
            while True:
                await asyncio.sleep(0.8)
                cuts[0] += faults.cut()

        cutter = asyncio.ensure_future(cut())
        try:
            detour = faults.url
            worked = await work(harness, place=lambda *it: cloud.open(*it, way="relay", url=detour))
        finally:
            cutter.cancel()
    assert cuts[0] > 1
    assert worked.exit.code == 0, worked.exit.log
    assert worked.calc == SOLVED
    assert len(worked.trajectory.turns) == len(harness.script(edits(PATCH), TASK.workdir))


class Announcing(ScriptedEngine):
    """An engine that says when it is first asked."""

    asked: asyncio.Event

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        self.asked.set()
        return await super().generate(ids, sampling, session)


@pytest.mark.parametrize("agent", AGENTS_OF_ALL_KINDS, ids=lambda agent: agent.name)
async def test_a_run_survives_a_provider_outage_longer_than_a_request_timeout(
    agent: Agent, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = built(agent.name)
    monkeypatch.setattr(Announcing, "asked", asyncio.Event(), raising=False)
    async with Faults(cloud.service.url) as faults:

        async def be_away() -> None:
            await Announcing.asked.wait()
            await asyncio.sleep(1)  # so that the command is under way, or its call on its way
            faults.answer = lambda _: "drop"
            cuts.append(faults.cut())
            await asyncio.sleep(AWAY_S)
            faults.answer = lambda _: None

        cuts: list[int] = []
        outage, url = asyncio.ensure_future(be_away()), faults.url
        command = f"echo once >>runs.txt; sleep {AWAY_S + 3}; echo it is over"
        try:
            worked = await work(
                harness,
                script=[agent.say(command), *harness.script(edits(PATCH), TASK.workdir)],
                place=lambda *it: cloud.open(
                    *it, way="relay", url=url, request_timeout_s=REQUEST_TIMEOUT_S
                ),
                engine=Announcing,
            )
        finally:
            outage.cancel()
    assert cuts
    assert cuts[0]
    assert worked.exit.code == 0, worked.exit.log
    assert worked.calc == SOLVED
    assert "+once\n" in worked.diff
    assert "once\n+once" not in worked.diff
    assert "it is over" in worked.results[0]
    assert "it is over" in worked.exit.log
    worked.assert_trained_whole()
