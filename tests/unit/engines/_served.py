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
from swerl.core.contracts import EngineSetup
from swerl.engines import scripted, sglang, torch_cpu, vllm
from swerl.engines._process import child, free_port, until_ready
from swerl.engines.families import tiny
from tests.sglang_cpu.interpreter import sglang_python, vllm_python
from tests.unit.engines._fake_sglang import fake_router, fakes
from tests.unit.engines._fake_vllm import FakeVllm

SERVERS = 2
Pair = tuple[Path, Path]
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
    cuts: bool = True
    """True if it samples with top-k and top-p."""
    block: int = 1
    """Tokens that its prefix cache holds together."""


@dataclass(frozen=True, slots=True)
class Served:
    """A live engine and the two model folders that it can serve."""

    engine: Any
    traits: Traits
    model: Path
    other: Path


class Makers:
    """Opens engines by name; servers that are slow to start are started once and shared."""

    def __init__(self, models: Pair, untied: Pair, logs: Path) -> None:
        """`untied`: models for vLLM, which on a CPU does not reload a head that is an embedding."""
        self._models = models
        self._untied = untied
        self._logs = logs
        self._shared = AsyncExitStack()
        self._urls: dict[str, list[str]] = {}

    async def close(self) -> None:
        await self._shared.aclose()

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[Served]:
        """Open an engine: a kind of server, how many, and whether behind a router."""
        kind, _, shape = name.partition("/")
        model, other = self._models_of(kind)
        if kind == "scripted":
            async with scripted.open(scripted.Options(), _scripted_setup()) as engine:
                yield Served(engine, Traits(http=False, real=False), model, other)
            return
        is_vllm = kind.endswith("vllm")
        traits = Traits(
            real=not kind.startswith("fake"),
            seeded=kind in ("torch-cpu", "vllm"),
            cuts=not is_vllm,
            block=32 if kind == "vllm" else 1,
        )
        async with AsyncExitStack() as stack:
            if not traits.real:
                fake = FakeVllm if is_vllm else None
                servers = await stack.enter_async_context(fakes(model, SERVERS, fake))
                urls = [server.url for server in servers]
                if shape == "router":
                    router = await stack.enter_async_context(fake_router(servers))
                    urls = [router.url]
            else:
                urls = await self._servers(kind)
                if shape == "router":
                    urls = [await stack.enter_async_context(_real_router(urls, self._logs))]
            url = urls[0] if shape in ("", "router") else tuple(urls)
            setup = _setup(self._logs, model)
            module: Any = vllm if is_vllm else sglang
            opened = module.open(module.Options(url=url), setup)
            yield Served(await stack.enter_async_context(opened), traits, model, other)

    def _models_of(self, kind: str) -> Pair:
        return self._untied if kind == "vllm" else self._models

    async def _servers(self, kind: str) -> list[str]:
        if kind not in self._urls:
            opened = [self._server(kind, self._logs / f"{kind}{n}") for n in range(SERVERS)]
            engines = await asyncio.gather(*map(self._shared.enter_async_context, opened))
            self._urls[kind] = [engine.url for engine in engines]
        return self._urls[kind]

    def _server(self, kind: str, logs: Path) -> AbstractAsyncContextManager[Any]:
        setup = _setup(logs, self._models_of(kind)[0])
        if kind == "torch-cpu":
            return torch_cpu.open(torch_cpu.Options(), setup)
        module: Any = vllm if kind == "vllm" else sglang
        python = vllm_python() if kind == "vllm" else sglang_python()
        return module.open(module.Options(python=python, start_timeout_s=600), setup)  # type: ignore[no-any-return]


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
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        str(_router_python()), "-m", "sglang_router.launch_router", "--policy=manual",
        "--host=127.0.0.1", f"--port={url.rpartition(':')[2]}",
        f"--prometheus-port={free_port()}", "--worker-urls", *urls,
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
