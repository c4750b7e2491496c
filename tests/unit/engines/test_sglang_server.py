"""A server's states, and restarts of a process; a stand-in answers /health."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.errors import EngineLostError
from swerl.engines._process import Launched, LaunchPlan, free_port
from swerl.engines._sglang_server import ServerState, SglangServer, supervise
from tests.unit.engines._launched import until

SCRIPT = """
import http.server, os, pathlib, sys, time
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
number = len(list(folder.iterdir()))
(folder / f"{number}").write_text(str(os.getpid()))
if number == 1:
    time.sleep(3600)  # its second start hangs
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""

S = ServerState
PATHS: dict[ServerState, tuple[ServerState, ...]] = {
    S.SERVING: (),
    S.UPDATING: (S.UPDATING,),
    S.LOST: (S.LOST,),
    S.PARTIAL: (S.PARTIAL,),
    S.STALE: (S.STALE,),
    S.RESTARTED: (S.STALE, S.RESTARTED),
    S.ENDED: (S.ENDED,),
}
"""State -> the changes that lead there."""


def new_server(url: str = "http://127.0.0.1:9") -> SglangServer:
    connections: Any = None
    return SglangServer(url, connections)


def in_state(state: ServerState) -> SglangServer:
    server = new_server()
    for each in PATHS[state]:
        if server.in_use and each is not S.UPDATING:
            server.end("") if each is S.ENDED else server.lose("", to=each)
        else:
            server.move(each)
    assert server.state is state
    return server


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ("lose", (S.LOST, S.STALE, S.LOST, S.PARTIAL, S.STALE, S.RESTARTED, S.ENDED)),
        ("died", (S.STALE, S.STALE, S.STALE, S.STALE, S.STALE, S.STALE, S.ENDED)),
        ("end", (S.ENDED,) * 7),
        (
            "restarted",
            (S.SERVING, S.UPDATING, S.LOST, S.PARTIAL, S.RESTARTED, S.RESTARTED, S.ENDED),
        ),
        ("use", (*(S.SERVING,) * 6, S.ENDED)),
        ("begin_update", (S.UPDATING, S.UPDATING, *(S.STALE,) * 4, S.ENDED)),
        ("keep_weights", (S.SERVING, S.SERVING, S.LOST, S.PARTIAL, S.STALE, S.RESTARTED, S.ENDED)),
    ],
)
def test_an_event_leads_from_every_state_to_one(
    event: str, expected: tuple[ServerState, ...]
) -> None:
    for before, after in zip(ServerState, expected, strict=True):
        server = in_state(before)
        if event == "lose":
            server.lose("why")
        elif event == "died":
            server.lose("why", to=S.STALE)
        elif event == "end":
            server.end("why")
        else:
            getattr(server, event)()
        assert server.state is after, before
        assert (server.lost is None) is server.in_use


async def test_a_lost_server_fails_its_requests_at_once_and_keeps_its_first_reason() -> None:
    server = new_server()
    waiting = asyncio.get_running_loop().create_future()
    server.waiting.add(waiting)
    server.lose("first")
    server.lose("second")
    with pytest.raises(EngineLostError, match="first"):
        await waiting
    with pytest.raises(EngineLostError, match="first"):
        await server.generate({}, {})


async def test_a_server_that_ended_is_not_worth_another_try() -> None:
    server = new_server()
    server.lose("it is silent")
    assert server.lost and server.lost.retryable
    server.end("it is dead")
    assert server.lost and not server.lost.retryable


async def test_a_restart_that_hangs_counts_and_the_next_one_follows(tmp_path: Path) -> None:
    starts, port = tmp_path / "starts", free_port()
    starts.mkdir()
    command = (sys.executable, "-c", SCRIPT, str(starts), str(port))
    plan = LaunchPlan(f"http://127.0.0.1:{port}", command, tmp_path / "log", {}, 120.0)
    server = new_server(plan.url)
    notices: list[str] = []
    async with Launched(plan) as launched:
        keeping = asyncio.create_task(
            supervise(launched, server, restarts=2, notify=notices.append)
        )
        launched.plan = replace(plan, start_timeout_s=10.0)
        os.kill(_pid(starts / "0"), signal.SIGKILL)
        await until((starts / "1").exists, limit_s=120)
        launched.plan = plan
        await until(lambda: server.state is ServerState.RESTARTED, limit_s=120)
        assert not Path(f"/proc/{_pid(starts / '1')}").exists()
        os.kill(_pid(starts / "2"), signal.SIGKILL)
        async with asyncio.timeout(120):
            await keeping
    assert server.state is ServerState.ENDED
    assert "did not restart" in notices[1] and "lost and will not be restarted" in notices[-1]


def _pid(note: Path) -> int:
    return int(note.read_text())
