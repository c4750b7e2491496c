"""Send weights into a live engine as a run does, from a trainer or from a test's own source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from swerl.core.learning import EngineTarget, Received, Sent
from swerl.engines._sglang_client import HttpEngine
from swerl.training.weight_sync import sync as weight_sync


class Source(Protocol):
    async def send(
        self, targets: Sequence[EngineTarget], *, version: str | None = None
    ) -> Sent: ...


@dataclass(frozen=True, slots=True)
class TrainerSource:
    """A trainer's weights, sent by one way."""

    trainer: Any
    way: str

    async def send(self, targets: Sequence[EngineTarget], *, version: str | None = None) -> Sent:
        return await self.trainer.send(targets, self.way, version=version)


async def receive(engine: HttpEngine, source: Source) -> Received:
    """Send a source's weights, as `weight_sync.sync` does the trainer's."""
    async with engine.update() as update:
        return await update.finish(await source.send(update.targets, version=update.version))


@asynccontextmanager
async def resending(engine: HttpEngine, source: Source) -> AsyncIterator[None]:
    """Send to servers that restart without weights, as a run does."""
    task = asyncio.create_task(weight_sync._resend(_Trainer(source), engine, ""))  # type: ignore[arg-type]
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


@dataclass(frozen=True, slots=True)
class _Trainer:
    source: Source

    async def send(
        self, targets: Sequence[EngineTarget], way: str, *, version: str | None = None
    ) -> Sent:
        return await self.source.send(targets, version=version)
