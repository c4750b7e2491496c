"""Whole episodes of real agents in `e2b` sandboxes, their model reached both ways."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from swerl import plugins
from swerl.engines.scripted import ScriptedEngine
from swerl.errors import SwerlError
from swerl.families import tiny
from swerl.gateway.app import Gateway
from swerl.gateway.limits import SessionLimits
from swerl.interfaces import Exit, Harness, Sandbox, SandboxBackend
from swerl.patch import edits
from swerl.sample import to_samples
from swerl.sandbox import Limits, Mount
from swerl.sandboxes import e2b, local
from swerl.task import GradingSpec, Task
from swerl.tree import Trajectory
from swerl.turn import Sampling

from ..e2b_server.helpers import KEY, Service, serving
from .e2b_faults import Faults

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
PUBLIC_PORT = 8080
"""Port at which the route that the test makes for the public way begins, inside."""
ROUTE = """
import socket, sys, threading
def carry(a, b):
    try:
        while data := a.recv(65536): b.sendall(data)
        b.shutdown(socket.SHUT_WR)
    except OSError: a.close(); b.close()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
while True:
    one, _ = server.accept()
    other = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    for pair in ((one, other), (other, one)):
        threading.Thread(target=carry, args=pair, daemon=True).start()
"""


class Forward:
    """A listener that carries every connection to a port of this machine: a public URL's way."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def attach(self, sock: socket.socket) -> None:
        self.server = await asyncio.start_server(self._serve, sock=sock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out_reader, out_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(_carry(reader, out_writer), _carry(out_reader, writer))


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        return
    finally:
        writer.close()


class WithRoute:
    """A backend whose sandboxes can reach one port of this machine, as a cloud's reach a URL."""

    def __init__(self, backend: SandboxBackend) -> None:
        self._backend = backend
        self.live, self.remove, self.price = backend.live, backend.remove, backend.price
        self.port = 0

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[Sandbox]:
        opened = self._backend.open(image, limits, workdir=workdir, mounts=mounts, name=name)
        async with opened as sandbox:
            if not self.port:
                yield sandbox
                return
            url = await sandbox.expose(Forward(self.port))
            ports = (str(PUBLIC_PORT), url.rpartition(":")[2])
            async with sandbox.start(["python3", "-c", ROUTE, *ports], user="root") as route:
                await anext(route.output())
                yield sandbox


@pytest.fixture(scope="module", params=AGENTS)
def harness(request: pytest.FixtureRequest) -> Harness:
    """A real agent in its default release; skips where it cannot be had."""
    module = plugins.load("harnesses", request.param)
    try:
        built: Harness = module.build(module.Options())
    except SwerlError as error:
        pytest.skip(f"no bundle of {request.param}: {error}")
    return built


@pytest.fixture
def task(tmp_path: Path) -> Task:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n" + "\n" * 6 + "x = 1\n")
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    spec = GradingSpec(grader="command", test_command="true")
    return Task("t-1", "r", f"dir:{folder}", "/repo", "Fix add.", spec)


@dataclass(frozen=True, slots=True)
class Cloud:
    """A provider, the backend behind it, and the template that holds the task's repository."""

    service: Service
    routed: WithRoute


@pytest.fixture
def cloud(task: Task, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    pytest.importorskip("e2b", reason="the package `e2b` is not installed")
    monkeypatch.setenv(e2b.KEY, KEY)
    routed = WithRoute(local.build(local.Options()))
    limits = Limits(memory_mib=2048, num_processes=256, disk_mib=2048)
    templates = {"repository": task.image}
    with serving(routed, workdir="/repo", templates=templates, limits=limits) as service:
        yield Cloud(service, routed)


@dataclass(frozen=True, slots=True)
class Worked:
    """What one run of an agent left."""

    exit: Exit
    files: Mapping[str, str]
    trajectory: Trajectory


async def _work(harness: Harness, task: Task, cloud: Cloud, way: str, url: str = "") -> Worked:
    family = tiny.build(None)
    engine = ScriptedEngine(family, lambda _: harness.script(edits(PATCH), task.workdir))
    async with Gateway(engine=engine, family=family) as gateway:
        cloud.routed.port = int(gateway.url.rpartition(":")[2]) if way == "public" else 0
        public = f"http://127.0.0.1:{PUBLIC_PORT}" if way == "public" else ""
        url = url or cloud.service.url
        options = e2b.Options(api_url=url, sandbox_url=url, way=way, public_url=public)
        opened = e2b.build(options).open(
            "repository", Limits(), workdir=task.workdir, mounts=harness.mounts()
        )
        async with opened as sandbox:
            session = gateway.open("s", sampling=Sampling(max_new_tokens=4096), limits=ROOMY)
            await harness.install(sandbox)
            endpoint = session.endpoint(await sandbox.expose(session))
            done = await harness.run(sandbox, task, endpoint, 120.0)
            files = {"calc.py": (await sandbox.read("/repo/calc.py")).decode()}
            return Worked(done, files, await session.close())


@pytest.mark.parametrize("way", ["relay", "public"])
async def test_an_agent_makes_the_gold_edit_and_every_sampled_token_is_trained(
    harness: Harness, task: Task, cloud: Cloud, way: str
) -> None:
    worked = await _work(harness, task, cloud, way)
    assert worked.exit.code == 0, worked.exit.log
    assert worked.files["calc.py"].startswith("def add(a, b):\n    return a + b\n")
    assert worked.files["calc.py"].endswith("x = 2\n")
    samples = to_samples(worked.trajectory, episode="e", task=task.id)
    assert len(samples) == 1
    assert samples[0].num_trained_tokens == worked.trajectory.num_sampled_tokens > 0
    assert not worked.trajectory.dropped


@pytest.mark.slow
async def test_an_agent_notices_nothing_of_streams_that_break(
    harness: Harness, task: Task, cloud: Cloud
) -> None:
    async with Faults(cloud.service.url) as faults:
        cuts = [0]

        async def cut() -> None:
            while True:
                await asyncio.sleep(0.8)
                cuts[0] += faults.cut()

        cutter = asyncio.ensure_future(cut())
        try:
            worked = await _work(harness, task, cloud, "relay", faults.url)
        finally:
            cutter.cancel()
    assert cuts[0] > 2
    assert worked.exit.code == 0, worked.exit.log
    assert worked.files["calc.py"].endswith("x = 2\n")
    assert len(worked.trajectory.turns) == len(harness.script(edits(PATCH), task.workdir))
