"""Engines that are HTTP servers: connect to running ones, or launch them."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.chat import Json
from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, install_command
from swerl.engines._process import Launched, LaunchPlan, free_port
from swerl.engines._sglang_client import HttpEngine, connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_server import Host, SglangServer
from swerl.engines._sglang_wire import PauseMode, ServedShape
from swerl.engines._weights import model_shape

CONTAINER_PYTHON = Path("/opt/sglang/bin/python")
"""The interpreter that the Containerfile gives to SGLang."""


class HttpOptions(BaseModel):
    """Settings of an engine whose servers run already, or are launched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | tuple[str, ...] | None = None
    """Base URL of a running server, of a router of SGLang, or of several servers; None launches
    one."""
    python: Path = Field(
        default_factory=lambda: next(filter(Path.is_file, [CONTAINER_PYTHON]), Path(sys.executable))
    )
    """Interpreter that has the engine, often one of an environment of its own. Without a value: the
    container's, where it exists, else the one that runs swerl."""
    servers: int = Field(default=1, ge=1)
    """Servers launched on this machine, each with the whole model."""
    gpus_per_server: int = Field(default=0, ge=0)
    """GPUs of each launched server, in order of their numbers, joined as tensor ranks; 0 shows all
    GPUs to each. A run with `cluster.gpus_per_node` uses `cluster.gpus_per_engine` instead."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of a launched server that died or hangs; more would hide the reason."""
    flags: tuple[str, ...] = ()
    """Further command-line flags for the launched server, passed on unchanged."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """Effect of a weight update on running requests: `retract`, `abort` or `in_place`. `retract`
    loses no token and leaves no stale cache."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds until the server must serve. Reading 70 GB of weights, compiling kernels and
    capturing graphs takes many minutes. A server that dies fails at once."""


@dataclass(frozen=True, slots=True)
class Software:
    """A program that serves models, and the releases that this client knows."""

    title: str
    name: str
    """Its Python module, `engine.type`, and swerl's extra."""
    tested: str
    """Releases that the tests compare with this client; the extra has the same."""

    def is_tested(self, number: str) -> bool:
        """Return True for a release that the tests compare with this client."""
        first, end = map(_release, re.findall(r"[\d.]+", self.tested))
        return first <= _release(number) < end

    def is_too_old(self, number: str) -> bool:
        """Return True for a release before the tested ones, which lacks a part of the contract."""
        return () < _release(number) < _release(self.tested)

    async def check(self, servers: Sequence[SglangServer], notify: Callable[[str], None]) -> None:
        """Raise EngineError on a server older than the tested releases; report a newer one."""
        for server in servers:
            number = ""
            with suppress(EngineError):  # a server that only implements the contract
                number = str((await server.get("/server_info")).get("version", ""))
            shown = number or "of an unknown release"
            message = f"{server.url} runs {self.title} {shown}; tested: {self.tested}"
            if self.is_too_old(number):
                raise EngineError(message, hint=f"in its environment: {install_command(self.name)}")
            if not self.is_tested(number):
                notify(message)

    async def require(self, python: Path) -> None:
        """Raise EngineError unless the interpreter has it."""
        probe = f"import sys, importlib.util as u; sys.exit(u.find_spec({self.name!r}) is None)"
        try:
            process = await asyncio.create_subprocess_exec(str(python), "-c", probe)
            if await process.wait() == 0:
                return
        except OSError:
            pass
        place = "set engine.python to the interpreter that has it"
        raise EngineError(
            f"{str(python)!r} has no {self.title}",
            hint=f"{install_command(self.name)}, or {place}",
        )


def _release(number: str) -> tuple[int, ...]:
    """Return the first three numbers of a release; none if it is unknown."""
    return tuple(map(int, re.findall(r"\d+", number)[:3]))


@dataclass(frozen=True, slots=True)
class HttpServing:
    """How the servers of an engine are started and called."""

    software: Software
    settings: ClientSettings
    shape: ServedShape
    command: Callable[[Path, int, int], Sequence[str]]
    """Model, port and number of GPUs -> the command of a server on this machine."""
    env: Mapping[str, str] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    """Further flags of a restart."""


@asynccontextmanager
async def open_servers(
    serving: HttpServing, options: HttpOptions, setup: EngineSetup
) -> AsyncIterator[HttpEngine]:
    """Yield a client of the servers at `options.url`, or of servers launched on `setup.model`."""
    software = serving.software
    if options.url:
        urls = [options.url] if isinstance(options.url, str) else list(options.url)
        async with connect(urls, shape=serving.shape, settings=serving.settings) as engine:
            await software.check(engine.pool.servers, setup.notify)
            if setup.model:
                await _require_same_model(engine.pool.servers, setup.model)
            yield engine
        return
    if setup.model is None:
        hint = "name a model folder, or set engine.url"
        raise EngineError(f"{software.name} needs a model", hint=hint)
    await software.require(options.python)
    async with AsyncExitStack() as stack:
        plans = _plans(serving, options, setup.model, setup.log_dir)
        hosts = [Launched(plan) for plan in plans]
        await asyncio.gather(*(stack.enter_async_context(host) for host in hosts))
        opened = open_served_hosts(serving, hosts, options, setup)
        yield await stack.enter_async_context(opened)


@asynccontextmanager
async def open_served_hosts(
    serving: HttpServing, hosts: Sequence[Host], options: HttpOptions, setup: EngineSetup
) -> AsyncIterator[HttpEngine]:
    """Yield a client of servers that serve `setup.model`; those that end or hang are restarted."""
    retries, wait_s = options.restarts, options.start_timeout_s
    async with connect(
        [host.url for host in hosts],
        shape=serving.shape,
        settings=replace(serving.settings, retries=retries, wait_s=wait_s),
        hosts=hosts,
        notify=setup.notify,
    ) as engine:
        await serving.software.check(engine.pool.servers, setup.notify)
        yield engine


async def _require_same_model(servers: Sequence[SglangServer], model: Path) -> None:
    """Raise EngineError if a server's vocabulary or tokenizer differs from that of `model`.

    Ids of another vocabulary are other words, or crash the server. A server reports the
    folder of its files; if this machine cannot read it, only the reported size is compared.
    """
    infos = await asyncio.gather(*(server.get("/model_info") for server in servers))
    for server, info in zip(servers, infos, strict=True):
        theirs = Path(str(info.get("model_path") or ""))
        ours = model_shape(model).num_vocab
        size = info.get("vocab_size") or model_shape(theirs).num_vocab
        if ours is not None and size is not None and int(size) != ours:
            raise EngineError(
                f"{server.url} serves {theirs} with {size} tokens, {model} has {ours}",
                hint="start it with the model that is trained",
            )
        mine, other = _vocabulary(model), _vocabulary(theirs)
        if mine is not None and other is not None and mine != other:
            raise EngineError(
                f"{server.url} serves {theirs} with another tokenizer than that of {model}",
                hint="start it with the model that is trained",
            )


def _vocabulary(folder: Path) -> Json:
    """Return the tokens and merges of a folder's tokenizer; None if it cannot be read."""
    try:
        spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = sorted([token["id"], token["content"]] for token in spec.get("added_tokens") or [])
        return [spec["model"].get("vocab"), spec["model"].get("merges"), added]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def environment(gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables that a launched server on these GPUs adds to the environment."""
    if not gpus:
        return {}
    return {
        # nvidia-smi numbers GPUs by their bus, and so do the trainer's ranks.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        # As in the trainer's ranks: both ends of a broadcast must agree.
        "NCCL_CUMEM_ENABLE": "0",
    }


def _plans(
    serving: HttpServing, options: HttpOptions, model: Path, log_dir: Path
) -> list[LaunchPlan]:
    """Return a plan per server; the first writes engine.log, the others engine-N.log."""
    plans = []
    for number in range(options.servers):
        size = options.gpus_per_server
        gpus = [str(gpu) for gpu in range(number * size, (number + 1) * size)]
        port = free_port()
        plans.append(
            LaunchPlan(
                url=f"http://127.0.0.1:{port}",
                command=tuple(serving.command(model, port, size)),
                log=log_dir / (f"engine-{number}.log" if number else "engine.log"),
                env={**environment(gpus), **serving.env},
                start_timeout_s=options.start_timeout_s,
                again=serving.again,
            )
        )
    return plans
