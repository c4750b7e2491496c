"""A server of a run in its own process: `python -m swerl.sandboxes.e2b_server.process SOCKET`.

SOCKET is the number of an inherited descriptor. One line comes in that says what to serve, and one
goes out with the URL. The server ends, and every sandbox with it, when asked by SIGTERM or when the
other end of the socket is closed.
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
from swerl.images.ondemand import on_demand
from swerl.recipe.check import plugin_options
from swerl.recipe.schema import PluginSection
from swerl.sandboxes.e2b_server.app import Server
from swerl.sandboxes.e2b_server.descriptors import raise_file_limit
from swerl.sandboxes.e2b_server.options import ServerOptions
from swerl.sandboxes.ledger.reap import reap_leftovers
from swerl.sandboxes.ledger.store import default_ledger
from swerl.sandboxes.ledger.tracked import tracked

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begin:
    """What to serve. The key travels here: a command line can be read by others."""

    key: str
    run: str
    """What the sandboxes are used for, as the ledger has it."""
    sandbox: Mapping[str, Json]
    """A recipe's section: the backend's `type` and its settings."""
    host: str
    """Address to listen on, at any free port."""
    max_sandboxes: int

    def line(self) -> bytes:
        """Return it as one line."""
        return json.dumps(asdict(self)).encode() + b"\n"


async def serve(link: socket.socket) -> None:
    """Serve until told to stop or until nobody is left to tell."""
    reader, writer = await asyncio.open_connection(sock=link)
    line = await reader.readline()
    if not line:
        return
    begin = Begin(**json.loads(line))
    told = asyncio.ensure_future(reader.read())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.cancel)
    try:
        backend = await _backend(begin)
        options = ServerOptions(
            host=begin.host,
            port=0,
            max_lifetime_s=math.inf,  # its orders say it
            max_sandboxes=begin.max_sandboxes,
            takes_orders=True,
        )
        async with Server(backend, begin.key, options) as server:
            writer.write(json.dumps({"url": server.url}).encode() + b"\n")
            await asyncio.wait([told])
    except SwerlError as error:
        writer.write(json.dumps({"error": str(error), "hint": error.hint}).encode() + b"\n")
        await writer.drain()


async def _backend(begin: Begin) -> SandboxBackend:
    """Build the backend, with images and ledger, and remove what killed starts left here."""
    for each in await reap_leftovers(default_ledger(), begin.run):
        told = each.sandbox.entry.name, each.outcome.value, each.problem
        _LOG.warning("sandbox %s of an earlier start: %s %s", *told)
    section = PluginSection.model_validate(begin.sandbox)
    options = plugin_options("sandboxes", section, section="sandbox")
    return on_demand(
        tracked(section.type, options, run=begin.run, warn=lambda text: _LOG.warning(text)), options
    )


def main() -> None:
    """Serve on the socket whose number is the argument."""
    logging.basicConfig(level=logging.WARNING)
    raise_file_limit()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
