"""SGLang: connect to a running server, or launch one, on GPUs or unmodified on a CPU."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from swerl.engines._process import child, until_ready
from swerl.engines._sglang_http import HttpEngine, connect
from swerl.engines._weights import num_vocab
from swerl.errors import EngineError, EngineLostError
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

    url: str | None = None
    """Base URL of a running server to drive; None launches one."""
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
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until the server must serve; a CPU start takes 20 to 40, a large model minutes."""


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[HttpEngine]:
    """Yield a client of the server at `options.url`, or of one launched on `setup.model`.

    Raises EngineError when nothing serves there, SGLang is not installed, or it does not come up.
    """
    vocab = num_vocab(setup.model) if setup.model else None
    if options.url:
        if not await _serves(options.url):
            message = f"no SGLang server answers at {options.url}"
            raise EngineLostError(message, hint="start it, or leave engine.url out to launch one")
        async with connect(options.url, num_vocab=vocab) as engine:
            yield engine
        return
    if setup.model is None:
        raise EngineError("sglang needs a model", hint="name a model folder, or set engine.url")
    log = setup.log_dir / "engine.log"
    async with (
        _launched(options, setup.model, log) as url,
        connect(url, num_vocab=vocab) as engine,
    ):
        yield engine


@asynccontextmanager
async def _launched(options: Options, model: Path, log: Path) -> AsyncIterator[str]:
    await _require_sglang(options)
    port = options.port or _free_port()
    url = f"http://127.0.0.1:{port}"
    env = {"OMP_NUM_THREADS": str(options.threads)} if options.cpu else {}
    if options.cpu:
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(CPU_FOLDER)}

    async def probe() -> str | None:
        return url if await _serves(url) else None

    async with child(_command(options, model, port), log, env=env) as process:
        yield await until_ready(probe, process, log, timeout_s=options.start_timeout_s)


def _command(options: Options, model: Path, port: int) -> list[str]:
    command = [str(options.python), "-m", "sglang.launch_server"]
    command += [f"--model-path={model.resolve()}", "--host=127.0.0.1", f"--port={port}", *FLAGS]
    if options.cpu:
        command += [*CPU_FLAGS, f"--max-total-tokens={options.max_total_tokens}"]
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
