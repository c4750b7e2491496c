"""An interpreter that seems to have SGLang: it runs the fake server as a process of its own.

So launches, restarts and signals are real, and a start takes a second.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil

SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
if sys.argv[1] != "-c":
    from tests.engines._fake_python import main
    main(sys.argv[1:], {router!r})
"""
ROOT = Path(__file__).parents[2]


def fake_python(folder: Path, *, router: Path | None = None) -> Path:
    """Write the interpreter; it asks nothing of SGLang's flags but model, host and port.

    `router` is one with the real sglang-router; without, a fake of that is run, too.
    """
    script = folder / "python"
    real = str(router) if router else ""
    script.write_text(SCRIPT.format(python=sys.executable, root=str(ROOT), router=real))
    script.chmod(0o755)
    return script


def main(arguments: list[str], real_router: str) -> None:
    """Serve until killed."""
    if arguments[:2] == ["-m", "sglang_router.launch_router"] and real_router:
        os.execv(real_router, [real_router, *arguments])
    asked = dict(word[2:].partition("=")[::2] for word in arguments[2:] if word.startswith("--"))
    asyncio.run(_serve(arguments[1], asked))


async def _serve(module: str, asked: dict[str, str]) -> None:
    from tests.engines._fake_sglang import FakeRouter, FakeServer

    if module == "sglang_router.launch_router":
        await FakeRouter([]).start(int(asked["port"]))
    else:
        assert module == "sglang.launch_server", module
        server = FakeServer(Path(asked["model-path"]))
        server.version = asked.get("weight-version", server.version)
        await server.start(int(asked["port"]), asked["host"])
    await asyncio.Event().wait()


def process_at(url: str) -> psutil.Process:
    """Return the process that listens at a URL."""
    port = int(url.rpartition(":")[2])
    (pid,) = {
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }
    return psutil.Process(pid)
