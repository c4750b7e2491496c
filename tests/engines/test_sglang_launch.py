"""Servers of one's own that are started again, here a stand-in that answers /health."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from swerl.engines._sglang_launch import Launched, LaunchPlan, free_port, keep
from swerl.engines._sglang_server import Server

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


async def test_a_start_that_hangs_counts_as_one_and_is_followed_by_the_next(tmp_path: Path) -> None:
    starts, port = tmp_path / "starts", free_port()
    starts.mkdir()
    command = (sys.executable, "-c", SCRIPT, str(starts), str(port))
    plan = LaunchPlan(f"http://127.0.0.1:{port}", command, tmp_path / "log", {}, 120.0)
    clients: Any = None
    server = Server(plan.url, clients)
    told: list[str] = []
    async with Launched(plan) as launched:
        keeping = asyncio.create_task(keep(launched, server, restarts=2, tell=told.append))
        launched.plan = replace(plan, start_timeout_s=1.0)
        os.kill(_pid(starts / "0"), signal.SIGKILL)
        async with asyncio.timeout(120):
            while not (starts / "1").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            launched.plan = plan
            while not (starts / "2").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not Path(f"/proc/{_pid(starts / '1')}").exists()
        assert server.lost and not server.ended
        os.kill(_pid(starts / "2"), signal.SIGKILL)
        async with asyncio.timeout(120):
            await keeping
    assert server.ended
    assert "did not come back" in told[1] and "gone for good" in told[-1]


def _pid(note: Path) -> int:
    return int(note.read_text())
