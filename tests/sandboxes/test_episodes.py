"""Whole episodes of real agents on every backend, their model reached by every way back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from swerl import plugins
from swerl.engines.scripted import ScriptedEngine
from swerl.errors import SwerlError
from swerl.families import tiny
from swerl.gateway.app import Gateway
from swerl.gateway.limits import SessionLimits
from swerl.interfaces import Exit, Harness, Listener, Sandbox
from swerl.patch import edits
from swerl.sample import to_samples
from swerl.sandbox import Limits, Mount
from swerl.sandboxes import docker, e2b, local
from swerl.sandboxes._relay import open_relay
from swerl.task import GradingSpec, Task
from swerl.tree import Trajectory
from swerl.turn import Sampling

from ..e2b_server.helpers import KEY, Service, serving
from .e2b_faults import Faults
from .helpers import sh
from .public_way import PUBLIC_PORT, WithRoute

pytestmark = pytest.mark.agents

AGENTS = ("claude-code", "codex")
PATCH = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
@@ -9,1 +9,1 @@
-x = 1
+x = 2
"""
ROOMY = SessionLimits(max_context_tokens=2**20)
TASK = Task("t-1", "r", "host", "/repo", "Fix add.", GradingSpec("command", test_command="true"))
REPOSITORY = """
printf 'def add(a, b):\\n    return a - b\\n\\n\\n\\n\\n\\n\\nx = 1\\n' >calc.py
git init -q . && git add . && git -c user.name=t -c user.email=t@localhost commit -qm base
"""
LIMITS = Limits(memory_mib=2048, num_processes=256, disk_mib=2048)

Place = Callable[[Gateway, Sequence[Mount]], AbstractAsyncContextManager[Sandbox]]
"""Opens a sandbox from which that gateway is to be reached."""


@pytest.fixture(scope="module", params=AGENTS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """A real agent in its default release; skips where it cannot be had."""
    module = plugins.load("harnesses", request.param)
    try:
        built: Harness = module.build(module.Options())
    except SwerlError as error:
        pytest.skip(f"no bundle of {request.param}: {error}")
    return built


@dataclass(frozen=True, slots=True)
class Cloud:
    """An E2B-compatible provider, and the backend behind it."""

    service: Service
    routed: WithRoute

    def open(
        self, gateway: Gateway, mounts: Sequence[Mount], *, way: str, url: str = ""
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox; `url` leads to the provider by a detour."""
        is_public, url = way == "public", url or self.service.url
        self.routed.port = int(gateway.url.rpartition(":")[2]) if is_public else 0
        public = f"http://127.0.0.1:{PUBLIC_PORT}" if is_public else ""
        options = e2b.Options(api_url=url, sandbox_url=url, way=way, public_url=public)
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


@dataclass(frozen=True, slots=True)
class Worked:
    """What one run of an agent left."""

    exit: Exit
    calc: str
    trajectory: Trajectory


async def work(harness: Harness, place: Place) -> Worked:
    """Let the agent work on the task until it is done."""
    family = tiny.build(None)
    engine = ScriptedEngine(family, lambda _: harness.script(edits(PATCH), TASK.workdir))
    async with (
        Gateway(engine=engine, family=family) as gateway,
        place(gateway, harness.mounts()) as sandbox,
    ):
        await sh(sandbox, REPOSITORY)
        session = gateway.open("s", sampling=Sampling(max_new_tokens=4096), limits=ROOMY)
        await harness.install(sandbox)
        endpoint = session.endpoint(await sandbox.expose(session))
        done = await harness.run(sandbox, TASK, endpoint, 120.0)
        calc = (await sandbox.read("/repo/calc.py")).decode()
        return Worked(done, calc, await session.close())


@pytest.mark.parametrize("where", PLACES)
async def test_an_agent_makes_the_gold_edit_and_every_sampled_token_is_trained(
    harness: Harness, where: str, request: pytest.FixtureRequest
) -> None:
    worked = await work(harness, PLACES[where](request))
    assert worked.exit.code == 0, worked.exit.log
    assert worked.calc.startswith("def add(a, b):\n    return a + b\n")
    assert worked.calc.endswith("x = 2\n")
    samples = to_samples(worked.trajectory, episode="e", task=TASK.id)
    assert len(samples) == 1
    assert samples[0].num_trained_tokens == worked.trajectory.num_sampled_tokens > 0
    assert not worked.trajectory.dropped


@pytest.mark.slow
async def test_an_agent_notices_nothing_of_streams_that_break(
    harness: Harness, cloud: Cloud
) -> None:
    async with Faults(cloud.service.url) as faults:
        cuts = [0]

        async def cut() -> None:
            while True:
                await asyncio.sleep(0.8)
                cuts[0] += faults.cut()

        cutter = asyncio.ensure_future(cut())
        try:
            detour = faults.url
            worked = await work(harness, lambda *it: cloud.open(*it, way="relay", url=detour))
        finally:
            cutter.cancel()
    assert cuts[0] > 2
    assert worked.exit.code == 0, worked.exit.log
    assert worked.calc.endswith("x = 2\n")
    assert len(worked.trajectory.turns) == len(harness.script(edits(PATCH), TASK.workdir))
