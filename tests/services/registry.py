"""A container registry of one's own, on a loopback port."""

from __future__ import annotations

import shutil
import socket
import tempfile
import urllib.request
from pathlib import Path

from .daemon import CannotRunError, Daemon, launch, require

_SETTINGS = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}, delete: {{enabled: true}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


def start() -> Daemon:
    """Start it; its address is `127.0.0.1:<port>`. Raises CannotRunError."""
    require("docker-registry")
    folder = Path(tempfile.mkdtemp(prefix="services-registry-"))
    port = _free_port()
    settings = folder / "settings.yml"
    settings.write_text(_SETTINGS.format(folder=folder, port=port))
    try:
        process = launch(
            ["docker-registry", "serve", str(settings)], folder, lambda: _answers(port)
        )
    except CannotRunError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Daemon(f"127.0.0.1:{port}", process, folder)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _answers(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/v2/", timeout=5) as answer:
        return bool(answer.status == 200)
