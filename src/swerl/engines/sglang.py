"""SGLang: connect to a running server, or launch one, on GPUs or unmodified on a CPU."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from swerl.engines._sglang_connect import connect
from swerl.engines._sglang_crew import PauseMode
from swerl.engines._sglang_http import ClientSettings, HttpEngine
from swerl.engines._sglang_launch import Launched, LaunchPlan, free_port, keeper
from swerl.engines._sglang_wire import ModelShape
from swerl.engines._weights import model_shape
from swerl.errors import EngineError, InputError
from swerl.interfaces import EngineSetup

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
    restarts: int = Field(default=3, ge=0)
    """How often a launched server that died is started again; more would hide what kills it."""
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
    shape = model_shape(setup.model) if setup.model else ModelShape()
    if options.routed_experts and not shape.num_experts:
        message = "engine.routed_experts needs a mixture-of-experts model, and its config.json"
        raise InputError(message, hint="leave it out, or set model.path")
    settings = ClientSettings(
        pause_mode=options.pause_mode,
        max_in_flight=options.max_in_flight,
        reply_s=options.reply_timeout_s,
        load_s=options.load_timeout_s,
        routed_experts=options.routed_experts,
    )
    async with AsyncExitStack() as stack:
        if options.url:
            urls = [options.url] if isinstance(options.url, str) else list(options.url)
            keep = None
        elif setup.model is None:
            raise EngineError("sglang needs a model", hint="name a model folder, or set engine.url")
        else:
            await _require_sglang(options)
            plans = _plans(options, setup.model, setup.log_dir)
            servers = [Launched(plan, restarts=options.restarts) for plan in plans]
            await asyncio.gather(*(stack.enter_async_context(server) for server in servers))
            urls = [server.plan.url for server in servers]
            keep = keeper(servers)
            settings = replace(settings, retries=options.restarts, wait_s=options.start_timeout_s)
        engine = await stack.enter_async_context(
            connect(urls, shape=shape, settings=settings, keep=keep)
        )
        if options.url and setup.model:
            await engine.require_match(setup.model)
        yield engine


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
            )
        )
    return plans


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
    probe = "import sys, importlib.util as u; sys.exit(u.find_spec('sglang') is None)"
    try:
        process = await asyncio.create_subprocess_exec(str(options.python), "-c", probe)
        found = await process.wait() == 0
    except OSError:
        found = False
    if not found:
        message = f"{str(options.python)!r} has no SGLang"
        raise EngineError(message, hint=_how_to_install(options.cpu))


def _how_to_install(cpu: bool) -> str:
    if not cpu:
        return "pip install sglang, or set engine.python to the interpreter that has it"
    return (
        "python3.11 -m venv sglang-env && sglang-env/bin/pip install torch==2.13.0 && "
        "sglang-env/bin/pip install --no-deps sglang==0.5.21 gguf && "
        f"sglang-env/bin/pip install -r {CPU_FOLDER / 'requirements.txt'}; "
        "then set engine.python to sglang-env/bin/python"
    )
