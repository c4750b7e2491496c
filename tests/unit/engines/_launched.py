"""Helpers for tests of servers that a run launches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from swerl.core.contracts import EngineSetup
from swerl.core.learning import WeightRef
from swerl.core.turn import Sampling
from swerl.engines._sglang_client import HttpEngine


def setup(tmp_path: Path, notices: list[str]) -> EngineSetup:
    model = tmp_path / "model"
    model.mkdir()
    return EngineSetup(family=None, log_dir=tmp_path, model=model, notify=notices.append)  # type: ignore[arg-type]


def ref(tmp_path: Path, version: str) -> WeightRef:
    folder = tmp_path / version
    folder.mkdir(exist_ok=True)
    return WeightRef(folder, version, "")


async def versions(engine: HttpEngine, sessions: int = 9) -> set[str]:
    """Return the weight versions that answer this many sessions."""
    calls = (engine.generate([5, 6], Sampling(2), f"s{n}") for n in range(sessions))
    return {reply.weight_version for reply in await asyncio.gather(*calls)}


async def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110  the condition changes in a server
            await asyncio.sleep(0.02)
