"""Plug-in for bench/chaos.py: `local` sandboxes through two servers of the run, as on a cluster.

On a cluster each machine has one. Both are on this machine and end with the controller.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from swerl.cluster.node import LocalNode
from swerl.cluster.sandbox_servers import SpreadBackend, serve_sandboxes
from swerl.core.contracts import Sandbox
from swerl.core.sandbox import Limits, LiveSandbox
from swerl.recipe.schema import Recipe

RECIPE = Recipe.model_validate({"name": "small", "rollout": {"concurrency": 8}})
"""Its name is that of tests/small.toml, so that `reap` finds the servers' sandboxes."""


class Servers:
    """Implements SandboxBackend; the servers start with the first sandbox."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._starting: asyncio.Task[SpreadBackend] | None = None

    @asynccontextmanager
    async def open(self, image: str, limits: Limits, **more: Any) -> AsyncIterator[Sandbox]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        spread = await asyncio.shield(self._starting)
        async with spread.open(image, limits, **more) as sandbox:
            yield sandbox

    async def live(self) -> Sequence[LiveSandbox]:
        return []  # each server has rows of its own in the ledger

    async def remove(self, name: str) -> None: ...

    def price(self, limits: Limits) -> float:
        return 0.0

    async def _start(self) -> SpreadBackend:
        nodes = [LocalNode(name="one"), LocalNode(name="two")]
        logs = Path(os.environ["SWERL_CACHE"]).parent
        servers = serve_sandboxes(nodes, RECIPE, logs=logs, emit=print)
        return await self._stack.enter_async_context(servers)


def build() -> Servers:
    return Servers()
