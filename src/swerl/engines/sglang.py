"""SGLang: connect to a running server, or launch one, on GPUs or unmodified on a CPU."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, InputError
from swerl.engines._sglang_connect import connect
from swerl.engines._sglang_crew import PauseMode
from swerl.engines._sglang_http import HttpEngine
from swerl.engines._sglang_launch import Host, Launched, LaunchPlan, free_port, keeper
from swerl.engines._sglang_router import ENVIRONMENT, router_command
from swerl.engines._sglang_settings import ClientSettings
from swerl.engines._sglang_update import STARTED_ANEW
from swerl.engines._sglang_wire import ModelShape
from swerl.engines._weights import model_shape

CPU_FOLDER = Path(__file__).with_name("_sglang_cpu")
CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    # Log-probabilities are compared with the trainer's, which computes in float32 here.
    "--dtype=float32",
    # The cache is sized by --max-total-tokens; the fraction only has to be satisfiable.
    "--mem-fraction-static=0.1",
    # Without it the scheduler keeps a core busy while idle.
    "--sleep-on-idle",
)
FLAGS = (
    # swerl sends and receives token ids; a model folder needs no tokenizer.
    "--skip-tokenizer-init",
    "--skip-server-warmup",
)

AGAIN = (f"--weight-version={STARTED_ANEW}",)
"""Flags of a server that is started again: other clients, too, must refuse its first tokens."""


class Options(BaseModel):
    """Settings of `engine.type = "sglang"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | tuple[str, ...] | None = None
    """Base URL of a running server or router, or of several servers; None launches one."""
    cpu: bool = False
    """Launch on the CPU: for tests and small models; GPUs are the default."""
    python: Path = Path(sys.executable)
    """Interpreter that has SGLang; its pinned packages often call for an environment of its own."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port of the launched server on the loopback interface; 0 takes a free one. More servers take
    the ports after it."""
    servers: int = Field(default=1, ge=1)
    """Servers launched on this machine, each with the whole model."""
    gpus_per_server: int = Field(default=0, ge=0)
    """GPUs of each launched server, one server's after the other's; 0 shows all to each."""
    router: bool = False
    """Start sglang-router in front of the launched servers, which then chooses a session's server;
    off because swerl does so itself, with a process and a copy of every request less."""
    restarts: int = Field(default=3, ge=0)
    """How often a launched server that died or hangs is started again; more would hide why."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of a CPU server; small models are slower with more than one."""
    max_total_tokens: int = Field(default=65536, ge=256)
    """Tokens that the cache of a CPU server holds; GPU servers size theirs by free memory."""
    flags: tuple[str, ...] = ()
    """More command-line flags for the launched server, given as they are."""
    pause_mode: PauseMode = PauseMode.RETRACT
    """What happens to running requests while weights load: `retract`, `abort` or `in_place`. The
    first loses no token and leaves no stale cache."""
    routed_experts: bool = False
    """Record which experts a mixture-of-experts model chose; about 1 kB a token of context."""
    max_in_flight: int = Field(default=4096, ge=1)
    """Requests sent at once; more wait in the client. Servers queue by themselves."""
    reply_timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds for one reply: the last resort, over every `budgets.model_call_s`."""
    load_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds for one server to load weights from disk; a large model takes minutes."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until the server must serve; a CPU start takes 20 to 40, a large model minutes."""


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[HttpEngine]:
    """Yield a client of what runs at `options.url`, or of a server launched on `setup.model`.

    Raises EngineError when nothing serves there, SGLang is not installed, or it does not come up.
    """
    if options.url and options.router:
        raise InputError(
            "engine.router needs servers that the run launches",
            hint="give the URL of a router of your own as engine.url",
        )
    if not options.url:
        if setup.model is None:
            raise EngineError("sglang needs a model", hint="name a model folder, or set engine.url")
        await _require_sglang(options)
        async with AsyncExitStack() as stack:
            plans = _plans(options, setup.model, setup.log_dir)
            hosts = [Launched(plan) for plan in plans]
            await asyncio.gather(*(stack.enter_async_context(host) for host in hosts))
            yield await stack.enter_async_context(open_hosts(hosts, options, setup))
        return
    urls = [options.url] if isinstance(options.url, str) else list(options.url)
    async with connect(urls, shape=_shape(options, setup), settings=_settings(options)) as engine:
        if setup.model:
            await engine.require_match(setup.model)
        yield engine


@asynccontextmanager
async def open_hosts(
    hosts: Sequence[Host], options: Options, setup: EngineSetup
) -> AsyncIterator[HttpEngine]:
    """Yield a client of servers that serve `setup.model`; those that end or hang start again."""
    settings = replace(_settings(options), retries=options.restarts, wait_s=options.start_timeout_s)
    async with AsyncExitStack() as stack:
        routers = [Launched(router_plan(options, setup.log_dir))] if options.router else []
        for router in routers:
            await stack.enter_async_context(router)
        yield await stack.enter_async_context(
            connect(
                [host.url for host in hosts],
                shape=_shape(options, setup),
                settings=settings,
                keep=keeper([*hosts, *routers], restarts=options.restarts, tell=setup.tell),
                router=routers[0].url if routers else None,
            )
        )


def _shape(options: Options, setup: EngineSetup) -> ModelShape:
    shape = model_shape(setup.model) if setup.model else ModelShape()
    if options.routed_experts and not shape.num_experts:
        raise InputError(
            "engine.routed_experts needs a mixture-of-experts model, and its config.json",
            hint="leave it out, or set model.path",
        )
    return shape


def _settings(options: Options) -> ClientSettings:
    return ClientSettings(
        pause_mode=options.pause_mode,
        max_in_flight=options.max_in_flight,
        reply_s=options.reply_timeout_s,
        load_s=options.load_timeout_s,
        routed_experts=options.routed_experts,
    )


def _plans(options: Options, model: Path, log_dir: Path) -> list[LaunchPlan]:
    """Return how each server is started; the first writes engine.log, the others engine-N.log."""
    plans = []
    for number in range(options.servers):
        env = environment(options)
        if options.gpus_per_server:
            first = number * options.gpus_per_server
            gpus = range(first, first + options.gpus_per_server)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        port = options.port + number if options.port else free_port()
        plans.append(
            LaunchPlan(
                url=f"http://127.0.0.1:{port}",
                command=tuple(server_command(options, model, host="127.0.0.1", port=port)),
                log=log_dir / (f"engine-{number}.log" if number else "engine.log"),
                env=env,
                start_timeout_s=options.start_timeout_s,
                again=AGAIN,
            )
        )
    return plans


def router_plan(options: Options, log_dir: Path) -> LaunchPlan:
    """Return how a router for the run's servers is started on this machine."""
    port = free_port()
    command = router_command(
        options.python, port=port, metrics_port=free_port(), reply_s=options.reply_timeout_s
    )
    return LaunchPlan(
        url=f"http://127.0.0.1:{port}",
        command=command,
        log=log_dir / "router.log",
        env=ENVIRONMENT,
        start_timeout_s=options.start_timeout_s,
    )


def environment(options: Options) -> dict[str, str]:
    """Return what a launched server's environment has besides ours."""
    if not options.cpu:
        return {}
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    return threads | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(CPU_FOLDER)}


def server_command(options: Options, model: Path, *, host: str, port: int) -> list[str]:
    """Return the command that serves a model at an address."""
    command = [str(options.python), "-m", "sglang.launch_server"]
    command += [f"--model-path={model.resolve()}", f"--host={host}", f"--port={port}", *FLAGS]
    if options.cpu:
        command += [*CPU_FLAGS, f"--max-total-tokens={options.max_total_tokens}"]
    else:
        command.append("--enable-memory-saver")  # a trainer on the same GPUs borrows the memory
    if options.routed_experts:
        command.append("--enable-return-routed-experts")
    return [*command, *options.flags]


async def _require_sglang(options: Options) -> None:
    if not await _has(options.python, "sglang"):
        raise EngineError(
            f"{str(options.python)!r} has no SGLang", hint=_how_to_install(options.cpu)
        )
    if options.router and not await _has(options.python, "sglang_router"):
        message = f"{str(options.python)!r} has no sglang-router"
        hint = f"{options.python} -m pip install sglang-router==0.3.2, or set engine.router = false"
        raise EngineError(message, hint=hint)


async def _has(python: Path, package: str) -> bool:
    probe = f"import sys, importlib.util as u; sys.exit(u.find_spec({package!r}) is None)"
    try:
        process = await asyncio.create_subprocess_exec(str(python), "-c", probe)
        return await process.wait() == 0
    except OSError:
        return False


def _how_to_install(cpu: bool) -> str:
    if not cpu:
        return "pip install sglang, or set engine.python to the interpreter that has it"
    return (
        "python3.11 -m venv sglang-env && sglang-env/bin/pip install torch==2.13.0 && "
        "sglang-env/bin/pip install --no-deps sglang==0.5.21 gguf && "
        f"sglang-env/bin/pip install -r {CPU_FOLDER / 'requirements.txt'}; "
        "then set engine.python to sglang-env/bin/python"
    )
