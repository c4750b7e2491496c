"""A CPU engine for dense models: NumPy, continuous batching, SGLang's contract."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import BaseModel, ConfigDict, Field

from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError
from swerl.engines._process import child, until_ready
from swerl.engines._sglang_client import HttpEngine, connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._weights import model_shape

MAX_RUNNING = 64
"""Requests that are batched at once; decoding gains little beyond 64 on one core. Keys and values
of twice as many sequences are cached, for the prefixes of sessions that wait for a tool."""
START_TIMEOUT_S = 600.0
"""Seconds until the server must serve; 1 to 4 on an idle machine, far more on a busy one. A server
that dies fails at once."""


class Options(BaseModel):
    """Settings of `engine.type = "torch-cpu"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: int = Field(default=1, ge=1)
    """CPU threads of the server; small models are slower with more than one."""
    context_length: int = Field(default=4096, ge=2)
    """Most tokens of one sequence; the model's own limit applies if it is lower."""


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[HttpEngine]:
    """Start the server on `setup.model` and yield its client; leaving the context stops it.

    Raises EngineError with the end of the server's log if it does not come up.
    """
    if setup.model is None:
        raise EngineError("torch-cpu needs a model", hint="name a model folder to serve")
    log, ready = setup.log_dir / "engine.log", setup.log_dir / "engine.ready.json"
    ready.unlink(missing_ok=True)
    arguments = {
        "--model": setup.model.resolve(),
        "--ready-file": ready.resolve(),
        "--max-running": MAX_RUNNING,
        "--num-rows": 2 * MAX_RUNNING,
        "--context-length": options.context_length,
    }
    flags = [str(part) for pair in arguments.items() for part in pair]
    command = [sys.executable, "-m", "swerl.engines._torch_server", *flags]
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(options.threads)}
    async with child(command, log, env=env) as process:

        async def port() -> int | None:
            return json.loads(ready.read_text())["port"] if ready.exists() else None

        answer = await until_ready(port, process, log, timeout_s=START_TIMEOUT_S)
        async with connect(
            [f"http://127.0.0.1:{answer}"],
            shape=model_shape(setup.model),
            settings=ClientSettings(streams=False, answers_in_loads=False),
            process=process,
        ) as engine:
            yield engine
