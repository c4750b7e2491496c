"""A run's own server in a process of its own: `python -m swerl.sandboxes.e2b_server.process
SOCKET`.

SOCKET is the number of an inherited descriptor. One line comes in with the ServeRequest, and one
goes out with the URL. The server ends, with all its sandboxes, at SIGTERM or when the other end of
the socket closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from swerl.core.chat import Json
from swerl.core.contracts import SandboxBackend
from swerl.core.errors import SwerlError
from swerl.core.jobs import PatientLoop
from swerl.images.ondemand import on_demand
from swerl.recipe.check import plugin_options
from swerl.recipe.sections import PluginSection
from swerl.sandboxes.e2b_server.app import SandboxServer, raise_file_limit
from swerl.sandboxes.e2b_server.served import ServerOptions
from swerl.sandboxes.ledger import default_ledger, reap_leftovers, tracked

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """Settings of the server. They include the key, because other users can read a command line."""

    key: str
    run: str
    """The run's name in the ledger."""
    sandbox: Mapping[str, Json]
    """A recipe's section: the backend's `type` and its settings."""
    host: str
    """Address to listen on, at any free port."""
    max_sandboxes: int

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


async def serve(link: socket.socket) -> None:
    """Serve until SIGTERM, or until the other end of the socket closes."""
    reader, writer = await asyncio.open_connection(sock=link)
    line = await reader.readline()
    if not line:
        return
    request = ServeRequest(**json.loads(line))
    stopped = asyncio.ensure_future(reader.read())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.cancel)
    try:
        backend = await _backend(request)
        options = ServerOptions(
            host=request.host,
            port=0,
            max_lifetime_s=math.inf,  # each order has its own
            max_sandboxes=request.max_sandboxes,
            takes_orders=True,
        )
        async with SandboxServer(backend, request.key, options) as server:
            writer.write(json.dumps({"url": server.url}).encode() + b"\n")
            await asyncio.wait([stopped])
    except SwerlError as error:
        writer.write(json.dumps({"error": str(error), "hint": error.hint}).encode() + b"\n")
        await writer.drain()


async def _backend(request: ServeRequest) -> SandboxBackend:
    """Build the backend, with images and ledger; remove the sandboxes that killed starts left
    here."""
    for leftover in await reap_leftovers(default_ledger(), request.run):
        result = leftover.entry.name, leftover.outcome.value, leftover.reason
        _LOG.warning("sandbox %s of an earlier start: %s %s", *result)
    section = PluginSection.model_validate(request.sandbox)
    options = plugin_options("sandboxes", section, section="sandbox")
    backend = tracked(section.type, options, run=request.run, warn=lambda text: _LOG.warning(text))
    return on_demand(section.type, backend)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("swerl.sandboxes.e2b_server.app").setLevel(logging.INFO)
    raise_file_limit()
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        runner.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
