"""An interpreter that seems to have SGLang: it runs the fake server as a process of its own.

So launches, restarts and signals are real, and a start takes a second.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil

SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
if sys.argv[1] != "-c":
    from tests.unit.engines._fake_python import main
    main(sys.argv[1:])
"""
ROOT = Path(__file__).parents[3]


def fake_python(folder: Path) -> Path:
    """Write the interpreter; of SGLang's flags it reads model, host, port and weight version."""
    script = folder / "python"
    script.write_text(SCRIPT.format(python=sys.executable, root=str(ROOT)))
    script.chmod(0o755)
    return script


def main(arguments: list[str]) -> None:
    """Serve until killed."""
    flags = dict(word[2:].partition("=")[::2] for word in arguments[2:] if word.startswith("--"))
    asyncio.run(_serve(arguments[1], flags))


async def _serve(module: str, flags: dict[str, str]) -> None:
    from tests.unit.engines._fake_sglang import FakeServer

    assert module == "sglang.launch_server", module
    server = FakeServer(Path(flags["model-path"]))
    server.version = flags.get("weight-version", server.version)
    await server.start(int(flags["port"]), flags["host"])
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
