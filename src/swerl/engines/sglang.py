"""SGLang: connect to running servers, or launch servers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from swerl.core.chat import Json
from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, InputError, install_command
from swerl.engines._process import child, how_ended, until_ready
from swerl.engines._sglang_client import HttpEngine, connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_server import Host, SglangServer
from swerl.engines._sglang_wire import RESTARTED, PauseMode, ServedShape
from swerl.engines._weights import model_shape

FLAGS = (
    # swerl sends and receives token ids; a model folder needs no tokenizer.
    "--skip-tokenizer-init",
    "--skip-server-warmup",
)
TESTED = ">=0.5.21,<0.5.24"
"""Releases of SGLang that the tests compare with this client; the extra `sglang` has the same."""
AGAIN = (f"--weight-version={RESTARTED}",)
"""Flags of a restarted server: every client must refuse its first tokens."""


CONTAINER_PYTHON = Path("/opt/sglang/bin/python")
"""The interpreter that the Containerfile gives to SGLang."""
ADAPTED = tuple(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))
"""Layers of a dense model that may have adapters."""


def _interpreter() -> Path:
    return CONTAINER_PYTHON if CONTAINER_PYTHON.is_file() else Path(sys.executable)


class Options(BaseModel):
    """Settings of `engine.type = "sglang"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | tuple[str, ...] | None = None
    """Base URL of a running server or router, or of several servers; None launches one."""
    python: Path = Field(default_factory=_interpreter)
    """Interpreter that has SGLang, often one of an environment of its own. Without a value: the
    container's, where it exists, else the one that runs swerl."""
    servers: int = Field(default=1, ge=1)
    """Servers launched on this machine, each with the whole model."""
    gpus_per_server: int = Field(default=0, ge=0)
    """GPUs of each launched server, in order of their numbers, joined by `--tp-size`; 0 shows all
    GPUs to each. A run with `cluster.gpus_per_node` uses `cluster.gpus_per_engine` instead."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of a launched server that died or hangs; more would hide the reason."""
    flags: tuple[str, ...] = ()
    """Further command-line flags for the launched server, passed on unchanged."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """Effect of a weight update on running requests: `retract`, `abort` or `in_place`. `retract`
    loses no token and leaves no stale cache."""
    routed_experts: bool = False
    """Record the chosen experts of a mixture-of-experts model; about 1 kB per token of context."""
    adapter_rank: int = Field(default=0, ge=0)
    """Rank of the adapters (`trainer.lora.rank`) that a dense model's servers load by themselves; 0
    loads weights that they are merged into. It needs `pause_mode = "abort"`: SGLang lets a running
    request keep the adapter that it began with."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds until the server must serve. Reading 70 GB of weights, compiling kernels and
    capturing graphs takes many minutes. A server that dies fails at once."""


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[HttpEngine]:
    """Yield a client of the servers at `options.url`, or of servers launched on `setup.model`.

    Raises EngineError if no server answers there, if SGLang is not installed, or if a launched
    server does not start.
    """
    if options.url:
        urls = [options.url] if isinstance(options.url, str) else list(options.url)
        shape, settings = _shape(options, setup), _settings(options)
        async with connect(urls, shape=shape, settings=settings) as engine:
            await _check_release(engine.pool.servers, setup.notify)
            if setup.model:
                await _require_same_model(engine.pool.servers, setup.model)
            yield engine
        return
    if setup.model is None:
        raise EngineError("sglang needs a model", hint="name a model folder, or set engine.url")
    await _require_sglang(options)
    async with AsyncExitStack() as stack:
        hosts = [Launched(plan) for plan in _plans(options, setup.model, setup.log_dir)]
        await asyncio.gather(*(stack.enter_async_context(host) for host in hosts))
        yield await stack.enter_async_context(open_hosts(hosts, options, setup))


@asynccontextmanager
async def open_hosts(
    hosts: Sequence[Host], options: Options, setup: EngineSetup
) -> AsyncIterator[HttpEngine]:
    """Yield a client of servers that serve `setup.model`; those that end or hang are restarted."""
    settings = replace(_settings(options), retries=options.restarts, wait_s=options.start_timeout_s)
    async with connect(
        [host.url for host in hosts],
        shape=_shape(options, setup),
        settings=settings,
        hosts=hosts,
        notify=setup.notify,
    ) as engine:
        await _check_release(engine.pool.servers, setup.notify)
        yield engine


def _shape(options: Options, setup: EngineSetup) -> ServedShape:
    shape = model_shape(setup.model) if setup.model else ServedShape()
    if options.routed_experts and not shape.num_experts:
        raise InputError(
            "engine.routed_experts needs a mixture-of-experts model, and its config.json",
            hint="leave it out, or set model.path",
        )
    return shape


def _settings(options: Options) -> ClientSettings:
    return ClientSettings(
        pause_mode=options.pause_mode,
        routed_experts=options.routed_experts,
        adapters="endpoint" if options.adapter_rank else "",
    )


async def _check_release(servers: Sequence[SglangServer], notify: Callable[[str], None]) -> None:
    """Raise EngineError on a server that is older than the tested releases; report a newer one."""
    for server in servers:
        number = ""
        with suppress(EngineError):  # a server that only implements the contract
            number = str((await server.get("/server_info")).get("version", ""))
        message = f"{server.url} runs SGLang {number or 'of an unknown release'}; tested: {TESTED}"
        if is_too_old(number):
            raise EngineError(message, hint=f"in its environment: {install_command('sglang')}")
        if not is_tested(number):
            notify(message)


def is_tested(number: str) -> bool:
    """Return True for a release that the tests compare with this client."""
    first, end = map(_release, re.findall(r"[\d.]+", TESTED))
    return first <= _release(number) < end


def is_too_old(number: str) -> bool:
    """Return True for a release before the tested ones, which lacks a part of the contract."""
    return () < _release(number) < _release(TESTED)


def _release(number: str) -> tuple[int, ...]:
    """Return the first three numbers of a release; none if it is unknown."""
    return tuple(map(int, re.findall(r"\d+", number)[:3]))


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


def server_command(
    options: Options, model: Path, *, host: str, port: int, num_gpus: int = 0, saver: bool = False
) -> list[str]:
    """Return the command that serves a model at an address, on `num_gpus` GPUs if given.

    With `saver` a trainer on the same GPUs can borrow the server's memory.
    """
    command = [str(options.python), "-m", "sglang.launch_server"]
    command += [f"--model-path={model.resolve()}", f"--host={host}", f"--port={port}", *FLAGS]
    if saver:
        command.append("--enable-memory-saver")
    if num_gpus:
        command.append(f"--tp-size={num_gpus}")
    if options.routed_experts:
        command.append("--enable-return-routed-experts")
    if options.adapter_rank:
        command += ["--enable-lora", f"--max-lora-rank={options.adapter_rank}"]
        # One more than the policy's: requests without an adapter, such as health checks.
        command += ["--max-loras-per-batch=2", "--lora-target-modules", *ADAPTED]
    return [*command, *options.flags]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Command and environment of one server."""

    url: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    start_timeout_s: float


def _plans(options: Options, model: Path, log_dir: Path) -> list[LaunchPlan]:
    """Return a plan per server; the first writes engine.log, the others engine-N.log."""
    plans = []
    for number in range(options.servers):
        size = options.gpus_per_server
        gpus = [str(gpu) for gpu in range(number * size, (number + 1) * size)]
        port = free_port()
        command = server_command(options, model, host="127.0.0.1", port=port, num_gpus=size)
        plans.append(
            LaunchPlan(
                url=f"http://127.0.0.1:{port}",
                command=tuple(command),
                log=log_dir / (f"engine-{number}.log" if number else "engine.log"),
                env=environment(gpus),
                start_timeout_s=options.start_timeout_s,
            )
        )
    return plans


class Launched:
    """A server process on this machine. Implements Host; an async context manager."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = plan
        self._stack = AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return self.plan.url

    @property
    def gpus(self) -> tuple[str, ...]:
        return ()

    async def __aenter__(self) -> Launched:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineError."""
        await self.stop()
        plan = self.plan

        async def probe() -> str | None:
            return plan.url if await serves(plan.url) else None

        command = plan.command if self._process is None else (*plan.command, *AGAIN)
        running = child(command, plan.log, env=plan.env)
        self._process = await self._stack.enter_async_context(running)
        await until_ready(probe, self._process, plan.log, timeout_s=plan.start_timeout_s)

    async def stop(self) -> None:
        await self._stack.aclose()

    async def ended(self) -> str:
        assert self._process is not None
        return f"its process ended: {how_ended(await self._process.wait())}"


async def serves(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"{url.rstrip('/')}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _require_sglang(options: Options) -> None:
    probe = "import sys, importlib.util as u; sys.exit(u.find_spec('sglang') is None)"
    try:
        process = await asyncio.create_subprocess_exec(str(options.python), "-c", probe)
        if await process.wait() == 0:
            return
    except OSError:
        pass
    raise EngineError(
        f"{str(options.python)!r} has no SGLang",
        hint=f"{install_command('sglang')}, or set engine.python to the interpreter that has it",
    )
