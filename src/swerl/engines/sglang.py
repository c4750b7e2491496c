"""SGLang: connect to running servers, or launch servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swerl.core.contracts import EngineSetup
from swerl.core.errors import InputError
from swerl.engines._serving import (
    HttpOptions,
    HttpServing,
    Software,
    open_served_hosts,
    open_servers,
)
from swerl.engines._sglang_client import HttpEngine
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_server import Host
from swerl.engines._sglang_wire import RESTARTED, ServedShape
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


class Options(HttpOptions):
    """Settings of `engine.type = "sglang"`."""

    routed_experts: bool = False
    """Record the chosen experts of a mixture-of-experts model; about 1 kB per token of context."""


SGLANG = Software("SGLang", "sglang", TESTED)


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[HttpEngine]:
    """Yield a client of the servers at `options.url`, or of servers launched on `setup.model`.

    Raises EngineError if no server answers there, if SGLang is not installed, or if a launched
    server does not start.
    """
    async with open_servers(_serving(options, setup), options, setup) as engine:
        yield engine


@asynccontextmanager
async def open_hosts(
    hosts: Sequence[Host], options: Options, setup: EngineSetup
) -> AsyncIterator[HttpEngine]:
    """Yield a client of servers that serve `setup.model`; those that end or hang are restarted."""
    async with open_served_hosts(_serving(options, setup), hosts, options, setup) as engine:
        yield engine


def _serving(options: Options, setup: EngineSetup) -> HttpServing:
    shape = model_shape(setup.model) if setup.model else ServedShape()
    if options.routed_experts and not shape.num_experts:
        raise InputError(
            "engine.routed_experts needs a mixture-of-experts model, and its config.json",
            hint="leave it out, or set model.path",
        )

    def command(model: Path, port: int, num_gpus: int) -> list[str]:
        return server_command(options, model, host="127.0.0.1", port=port, num_gpus=num_gpus)

    settings = ClientSettings(pause_mode=options.pause_mode, routed_experts=options.routed_experts)
    return HttpServing(SGLANG, settings, shape, command, again=AGAIN)


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
    if num_gpus:  # by itself SGLang serves a model in fp32 in float16
        command += [f"--tp-size={num_gpus}", "--dtype=bfloat16"]
    if options.routed_experts:
        command.append("--enable-return-routed-experts")
    return [*command, *options.flags]
