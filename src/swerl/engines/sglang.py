"""SGLang: connect to a running server, or launch one, on GPUs or unmodified on a CPU."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from swerl.engines._process import child, until_ready
from swerl.engines._sglang_fleet import PauseMode
from swerl.engines._sglang_http import ClientSettings, HttpEngine, connect
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
    """Port of the launched server on the loopback interface; 0 takes a free one."""
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
    process = None
    async with AsyncExitStack() as stack:
        if options.url:
            urls = [options.url] if isinstance(options.url, str) else list(options.url)
        elif setup.model is None:
            raise EngineError("sglang needs a model", hint="name a model folder, or set engine.url")
        else:
            log = setup.log_dir / "engine.log"
            launched = _launched(options, setup.model, log)
            url, process = await stack.enter_async_context(launched)
            urls = [url]
        yield await stack.enter_async_context(
            connect(urls, shape=shape, settings=settings, process=process)
        )


@asynccontextmanager
async def _launched(
    options: Options, model: Path, log: Path
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    await _require_sglang(options)
    port = options.port or _free_port()
    url = f"http://127.0.0.1:{port}"
    env = {"OMP_NUM_THREADS": str(options.threads)} if options.cpu else {}
    if options.cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(CPU_FOLDER)}

    async def probe() -> str | None:
        return url if await _serves(url) else None

    async with child(_command(options, model, port), log, env=env) as process:
        yield await until_ready(probe, process, log, timeout_s=options.start_timeout_s), process


def _command(options: Options, model: Path, port: int) -> list[str]:
    command = [str(options.python), "-m", "sglang.launch_server"]
    command += [f"--model-path={model.resolve()}", "--host=127.0.0.1", f"--port={port}", *FLAGS]
    if options.cpu:
        command += [*CPU_FLAGS, f"--max-total-tokens={options.max_total_tokens}"]
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


async def _serves(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.get(f"{url.rstrip('/')}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
