"""Time what sglang-router adds to a request, on servers that sample nothing.

    SWERL_SGLANG_PYTHON=sglang-env/bin/python python bench/router.py

Two fakes of SGLang's contract answer one token each; requests of PROMPTS ids go to them in turns
directly and through the router, CALLS each way and length. Prints medians in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

from swerl.core.turn import Sampling
from swerl.engines import sglang
from swerl.engines._sglang_connect import connect
from swerl.engines._sglang_http import HttpEngine
from swerl.engines._sglang_launch import Launched

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.engines import _fake_sglang

PROMPTS = (1_000, 16_000, 96_000)
CALLS = 60
NUMBERS = count()


async def measure(root: Path, python: Path) -> list[dict[str, float]]:
    """Return median milliseconds a request, by prompt length and way."""
    logging.getLogger("aiohttp.server").disabled = True  # the router tries HTTP/2 first
    _fake_sglang.CONTEXT = 1 << 20
    options = sglang.Options(python=python, router=True)
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(_fake_sglang.fakes(root, 2))
        router = await stack.enter_async_context(Launched(sglang.router_plan(options, root)))
        urls = [server.url for server in servers]
        ways = {
            "direct": await stack.enter_async_context(connect(urls)),
            "router": await stack.enter_async_context(connect(urls, router=router.url)),
        }
        return [await _row(length, ways) for length in PROMPTS]


async def _row(length: int, ways: dict[str, HttpEngine]) -> dict[str, float]:
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(CALLS):
        for name, engine in ways.items():
            # No two prompts begin alike, so that the fakes compare nothing.
            prompt = [100_000 + next(NUMBERS), *range(3, length + 2)]
            began = time.perf_counter()
            await engine.generate(prompt, Sampling(1), "session")
            spent[name].append(1000 * (time.perf_counter() - began))
    medians = {name: round(statistics.median(each), 2) for name, each in spent.items()}
    return {"ids": length, **medians}


def main() -> None:
    """Measure and print a table and JSON."""
    python = os.environ.get("SWERL_SGLANG_PYTHON")
    if not python:
        sys.exit("SWERL_SGLANG_PYTHON has no sglang-router: docs/guides/engines.md")
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(Path(folder), Path(python)))
    print(f"{'ids':>8} {'direct ms':>10} {'router ms':>10}")
    for row in rows:
        print(f"{row['ids']:>8.0f} {row['direct']:>10.2f} {row['router']:>10.2f}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
