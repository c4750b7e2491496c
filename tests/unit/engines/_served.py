"""Every engine that the contract test runs, and the features of each."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from swerl.core.chat import Message, Role
from swerl.core.contracts import Engine, EngineSetup
from swerl.engines import scripted, sglang, torch_cpu
from swerl.engines._process import child, until_ready
from swerl.engines.families import tiny
from tests.sglang_cpu.interpreter import sglang_python
from tests.unit.engines._fake_sglang import fake_router, fakes

SERVERS = 2
ROUTER_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Traits:
    """What an engine is beyond the contract of all."""

    http: bool = True
    """True if it implements SGLang's contract: prefixes, aborts and refusals can be seen."""
    real: bool = True
    """True if its tokens come from the model's weights."""
    seeded: bool = False
    """True if a seed fixes the reply."""


@dataclass(frozen=True, slots=True)
class Served:
    """A live engine and the two model folders that it can serve."""

    engine: Any
    traits: Traits
    model: Path
    other: Path


class Makers:
    """Opens engines by name; servers that are slow to start are started once and shared."""

    def __init__(self, model: Path, logs: Path) -> None:
        self.model = model
        self._logs = logs
        self._shared = AsyncExitStack()
        self._urls: dict[str, list[str]] = {}

    async def close(self) -> None:
        await self._shared.aclose()

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[tuple[Engine, Traits]]:
        """Open an engine: a kind of server, how many, and whether behind a router."""
        kind, _, shape = name.partition("/")
        if kind == "scripted":
            async with scripted.open(scripted.Options(delay_s=0.05), _scripted_setup()) as engine:
                yield engine, Traits(http=False, real=False)
            return
        traits = Traits(real=kind != "fake", seeded=kind == "torch-cpu")
        async with AsyncExitStack() as stack:
            if kind == "fake":
                servers = await stack.enter_async_context(fakes(self.model, SERVERS))
                urls = [server.url for server in servers]
                if shape == "router":
                    router = await stack.enter_async_context(fake_router(servers))
                    urls = [router.url]
            else:
                urls = await self._servers(kind)
                if shape == "router":
                    urls = [await stack.enter_async_context(_real_router(urls, self._logs))]
            url = urls[0] if shape in ("", "router") else tuple(urls)
            setup = _setup(self._logs, self.model)
            yield (
                await stack.enter_async_context(sglang.open(sglang.Options(url=url), setup)),
                traits,
            )

    async def _servers(self, kind: str) -> list[str]:
        if kind not in self._urls:
            opened = [self._server(kind, self._logs / f"{kind}{n}") for n in range(SERVERS)]
            engines = await asyncio.gather(*map(self._shared.enter_async_context, opened))
            self._urls[kind] = [engine.url for engine in engines]
        return self._urls[kind]

    def _server(self, kind: str, logs: Path) -> AbstractAsyncContextManager[Any]:
        setup = _setup(logs, self.model)
        if kind == "torch-cpu":
            return torch_cpu.open(torch_cpu.Options(), setup)
        options = sglang.Options(python=sglang_python(), start_timeout_s=600)
        return sglang.open(options, setup)


def _router_python() -> Path:
    """Return the interpreter with sglang-router, or skip the test."""
    python = sglang_python()
    probe = "import sys, importlib.util as u; sys.exit(u.find_spec('sglang_router') is None)"
    if subprocess.run([python, "-c", probe], check=False).returncode:
        pytest.skip("SWERL_SGLANG_PYTHON has no sglang-router")
    return python


@asynccontextmanager
async def _real_router(urls: list[str], logs: Path) -> AsyncIterator[str]:
    """Run sglang-router in front of these servers."""
    url = f"http://127.0.0.1:{sglang.free_port()}"
    command = [
        str(_router_python()), "-m", "sglang_router.launch_router", "--policy=manual",
        "--host=127.0.0.1", f"--port={url.rpartition(':')[2]}",
        f"--prometheus-port={sglang.free_port()}", "--worker-urls", *urls,
    ]  # fmt: skip
    log = logs / "router.log"

    async def ready() -> str | None:
        try:
            async with (
                aiohttp.ClientSession() as client,
                client.get(f"{url}/workers") as response,
            ):
                return url if len((await response.json())["workers"]) == len(urls) else None
        except (aiohttp.ClientError, ValueError):
            return None

    async with child(command, log) as process:
        yield await until_ready(ready, process, log, timeout_s=ROUTER_START_S)


def _setup(logs: Path, model: Path) -> EngineSetup:
    return EngineSetup(family=None, log_dir=logs, model=model)  # type: ignore[arg-type]


def _scripted_setup() -> EngineSetup:
    lines = [Message(Role.ASSISTANT, "I look at it once more, and then again. " * 4)] * 10_000
    return EngineSetup(family=tiny.build(None), log_dir=Path(), script=lambda session: lines)
