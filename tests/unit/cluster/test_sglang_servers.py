"""Servers on nodes: started, restarted, ended. A stand-in serves what SGLang serves at /health."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from swerl.cluster.node import LocalNode, LocalProcess, ProcessSpec
from swerl.cluster.sglang_servers import NodeServer, engines_of, serve_on
from swerl.core.errors import ClusterError, EngineError, RecipeError
from swerl.engines._sglang_server import ServerState, SglangServer, supervise
from swerl.engines.sglang import Options
from swerl.recipe.schema import ClusterSection
from tests.unit.cluster.conftest import Lost

SERVER = """#!{python}
import http.server, os, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

asked = dict(word[2:].partition("=")[::2] for word in sys.argv if word.startswith("--"))
assert sys.argv[1:3] == ["-m", "sglang.launch_server"], sys.argv
if "broken" in asked:
    sys.exit("no such flag: broken")
http.server.HTTPServer((asked["host"], int(asked["port"])), Health).serve_forever()
"""
CPU = ClusterSection()


@pytest.fixture
def options(tmp_path: Path) -> Options:
    python = tmp_path / "python"
    python.write_text(SERVER.format(python=sys.executable))
    python.chmod(0o755)
    return Options(python=python, restarts=1, start_timeout_s=60)


def _server(host: NodeServer) -> SglangServer:
    clients: Any = None
    return SglangServer(host.url, clients)


def _pid(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
        return int(reply.read())


async def test_a_server_a_node_comes_back_when_killed_and_ends_with_the_block(
    options: Options, tmp_path: Path
) -> None:
    nodes = [LocalNode(name="n1"), LocalNode(name="n2")]
    told: list[str] = []
    async with serve_on(nodes, options, tmp_path, cluster=CPU, logs=tmp_path) as hosts:
        urls = [host.url for host in hosts]
        assert len(set(urls)) == 2
        keeping = asyncio.create_task(
            supervise(hosts[0], _server(hosts[0]), restarts=1, notify=told.append)
        )
        first = _pid(urls[0])
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:
                try:
                    second = await asyncio.to_thread(_pid, urls[0])
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        assert second != first
        assert "restarting it (1 of 1)" in str(told)
        other = _pid(urls[1])
        keeping.cancel()
    assert not Path(f"/proc/{second}").exists()
    assert not Path(f"/proc/{other}").exists()


async def test_a_server_that_does_not_come_up_is_an_error_with_its_words(
    options: Options, tmp_path: Path
) -> None:
    broken = options.model_copy(update={"flags": ("--broken",)})
    with pytest.raises(EngineError, match=r"on n1 did not come up .*no such flag"):
        async with serve_on([LocalNode(name="n1")], broken, tmp_path, cluster=CPU, logs=tmp_path):
            pass


async def test_a_lost_server_is_reported_and_the_others_continue(
    options: Options, tmp_path: Path
) -> None:
    told: list[str] = []
    lost, kept = Lost(name="lost"), LocalNode(name="kept")
    async with serve_on([lost, kept], options, tmp_path, cluster=CPU, logs=tmp_path) as hosts:
        server = _server(hosts[0])
        os.kill(_pid(hosts[0].url), signal.SIGKILL)
        async with asyncio.timeout(60):
            await supervise(hosts[0], server, restarts=1, notify=told.append)
        assert "did not restart: the machine is gone" in str(told)
        assert server.state is ServerState.ENDED
        assert _pid(hosts[1].url)


async def test_running_servers_end_if_another_cannot_start(
    options: Options, tmp_path: Path
) -> None:
    began = LocalNode(name="began")
    processes = []
    start = began.start

    async def noted(order: ProcessSpec) -> LocalProcess:
        processes.append(await start(order))
        return processes[-1]

    began.start = noted  # type: ignore[method-assign]
    gone = Lost(name="gone")
    gone.started = 1
    with pytest.raises(ClusterError, match="machine is gone"):
        async with serve_on([began, gone], options, tmp_path, cluster=CPU, logs=tmp_path):
            pass
    (process,) = processes
    assert process.ended.done()


def test_engines_of_a_node() -> None:
    node = LocalNode(gpus=tuple("01234567"))
    assert engines_of(LocalNode(), CPU) == 1
    assert engines_of(node, ClusterSection(gpus_per_node=8, gpus_per_engine=2)) == 4
    with pytest.raises(RecipeError, match="exceeds a node"):
        engines_of(node, ClusterSection(gpus_per_node=8, gpus_per_engine=16))
