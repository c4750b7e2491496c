"""vLLM: its servers behind the calls of SGLang's contract, which the pool and updates make.

A call becomes one or several of vLLM's. Those that change weights exist only in a server that runs
with VLLM_SERVER_DEV_MODE=1. Read off vLLM 0.32.0: `entrypoints/scale_out/token_in_token_out` and
`entrypoints/rl/online`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swerl.core.chat import Json
from swerl.core.contracts import EngineSetup
from swerl.core.errors import EngineError, EngineLostError
from swerl.core.files import read_json
from swerl.engines._serving import HttpOptions, HttpServing, Software, open_servers
from swerl.engines._sglang_client import HttpEngine
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_server import CONTROL_S, Connections, SglangServer, lost
from swerl.engines._sglang_wire import PARTIAL, PauseMode, ServedShape
from swerl.engines._weights import model_shape, shards
from swerl.engines.families._megatron_plan import text_config

FLAGS = (
    # No tokenizer; log-probabilities after the temperature; the number of cached tokens.
    "--tokens-only",
    "--logprobs-mode=processed_logprobs",
    "--enable-prompt-tokens-details",
)
TESTED = ">=0.32,<0.33"
"""Releases of vLLM that the tests compare with this client; the extra `vllm` has the same."""
VLLM = Software("vLLM", "vllm", TESTED)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
PAUSES = {
    PauseMode.RETRACT: "/pause?mode=keep&clear_cache=true",
    PauseMode.ABORT: "/pause?mode=abort&clear_cache=true",
    PauseMode.IN_PLACE: "/pause?mode=keep&clear_cache=false",
}
REQUEST_PREFIX = "generate-tokens-"
"""vLLM puts it before the id of a request."""
NO_LOGPROB = -9999.0
"""vLLM's log-probability of a token that has none, and its least one."""


class Options(HttpOptions):
    """Settings of `engine.type = "vllm"`."""


@asynccontextmanager
async def open(options: Options, setup: EngineSetup) -> AsyncIterator[HttpEngine]:
    """Yield a client of the servers at `options.url`, or of servers launched on `setup.model`.

    Raises EngineError if no server answers there, if vLLM is not installed, or if a launched
    server does not start.
    """

    def command(model: Path, port: int, num_gpus: int) -> list[str]:
        words = [str(options.python), "-m", "vllm.entrypoints.cli.main", "serve"]
        words += [str(model.resolve()), "--host=127.0.0.1", f"--port={port}", *FLAGS]
        if num_gpus:
            words.append(f"--tensor-parallel-size={num_gpus}")
        return [*words, *options.flags]

    serving = HttpServing(
        VLLM,
        ClientSettings(
            pause_mode=options.pause_mode,
            streams=False,
            answers_in_loads=False,
            server=VllmServer,
        ),
        model_shape(setup.model) if setup.model else ServedShape(),
        command,
        env=ENVIRONMENT,
    )
    async with open_servers(serving, options, setup) as engine:
        for server in engine.pool.servers:
            assert isinstance(server, VllmServer)
            await server.inspect()
        yield engine


class VllmServer(SglangServer):
    """One vLLM server."""

    title = "vLLM"
    generate_path = "/inference/v1/generate"

    def __init__(self, url: str, connections: Connections) -> None:
        super().__init__(url, connections)
        self._version = ""
        """The latest version that it reported."""
        self._folder = ""
        """The folder that its weights are from."""
        self._on_cpu = False

    async def inspect(self) -> None:
        """Raise EngineError if it reports other log-probabilities than the sampled ones."""
        path = "/server_info?config_format=json"
        config = (await self._call("GET", path, None, timeout_s=CONTROL_S))["vllm_config"]
        if (mode := config["model_config"]["logprobs_mode"]) != "processed_logprobs":
            raise EngineError(
                f"{self.url} reports {mode}, which leave out the temperature",
                hint=f"start it with {' '.join(FLAGS)}",
            )
        self._on_cpu = config["device_config"]["device"] == "cpu"

    async def generate(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        request = request_body(body)
        answer = await super().generate(request, headers)
        try:
            return self._sampled(answer, request["sampling_params"]["max_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"the engine's reply is inconsistent: {error!r}", hint=f"tested: vLLM {TESTED}"
            ) from error

    def _sampled(self, answer: Mapping[str, Any], limit: int) -> dict[str, Any]:
        """Return an answer as SGLang gives it."""
        (choice,) = answer["choices"]
        usage = answer["usage"]
        ids, finish = choice["token_ids"], choice["finish_reason"]
        if finish == "length" and len(ids) < limit:
            raise EngineError(
                f"{usage['prompt_tokens']} tokens and {limit} new ones exceed the context length",
                hint="lower rollout.max_context_tokens, or raise --max-model-len in engine.flags",
            )
        scores = (choice["logprobs"] or {}).get("content") or ()
        meta = {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[_logprob(score), score["token_id"]] for score in scores],
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            "weight_version": self._version,
            "weight_versions": choice["weight_versions"],
        }
        return {"output_ids": ids, "meta_info": meta}

    async def get(self, path: str, *, timeout_s: float = CONTROL_S) -> dict[str, Any]:
        if path not in ("/model_info", "/server_info"):
            return await super().get(path, timeout_s=timeout_s)
        info = await super().get("/weight_info", timeout_s=timeout_s)
        self._version = str(info["weight_version"])
        if path == "/server_info":
            return info | await super().get("/version", timeout_s=timeout_s)
        if not self._folder:
            models = await super().get("/v1/models", timeout_s=timeout_s)
            self._folder = str(models["data"][0]["root"])
        return {**info, "model_path": self._folder}

    async def post(
        self, path: str, body: Mapping[str, Json], *, timeout_s: float = CONTROL_S
    ) -> dict[str, Any]:
        request: dict[str, Json] = {}
        match path:
            case "/pause_generation":
                path = PAUSES[PauseMode(str(body["mode"]))]
            case "/continue_generation":
                path = "/resume"
            case "/abort_request":
                path, request = (
                    "/abort_requests",
                    {"request_ids": [f"{REQUEST_PREFIX}{body['rid']}"]},
                )
            case "/update_weight_version":
                self._version = str(body["new_version"])
                request = {"new_version": self._version}
            case "/update_weights_from_disk":
                return await self._load(body, timeout_s)
            case _:
                raise EngineError(f"vLLM has no {path}", hint='set engine.type = "sglang"')
        return await super().post(path, request, timeout_s=timeout_s)

    async def _load(self, body: Mapping[str, Json], timeout_s: float) -> dict[str, Any]:
        """Load a folder; if vLLM cannot, load the one before.

        Raises EngineError if the old weights serve, EngineLostError if it holds mixed ones.
        """
        folder, version = str(body["model_path"]), str(body["weight_version"])
        shards(Path(folder))
        if self._on_cpu:
            config = text_config(read_json(Path(folder) / "config.json"))
            if config.get("tie_word_embeddings", True):
                raise EngineError(
                    "vLLM on a CPU does not reload the head of a model whose head is its embedding",
                    hint='set engine.type = "torch-cpu" or "sglang"',
                )
        old, old_version = self._folder, self._version
        await self._name(f"{PARTIAL}{self.url}")
        try:
            await self._reload(folder, timeout_s)
        except EngineLostError:
            raise
        except EngineError as refusal:
            try:
                await self._reload(old, timeout_s)
            except EngineError as error:
                raise lost(self.url, f"its weights are mixed: {error}") from refusal
            await self._name(old_version)
            raise
        if body["flush_cache"]:
            path = "/reset_prefix_cache?reset_running_requests=true"
            await super().post(path, {}, timeout_s=timeout_s)
        self._folder = folder
        await self._name(version)
        return {}

    async def _reload(self, folder: str, timeout_s: float) -> None:
        call: dict[str, Json] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await super().post("/collective_rpc", call, timeout_s=timeout_s)

    async def _name(self, version: str) -> None:
        await self.post("/update_weight_version", {"new_version": version})


def request_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for vLLM of a body of SGLang's /generate.

    Raises EngineError on top-k and top-p: vLLM's log-probabilities would be those after the cut.
    """
    params = body["sampling_params"]
    if params["top_p"] < 1 or params["top_k"] > 0:
        raise EngineError(
            "vLLM reports log-probabilities after top-k and top-p, which no trainer computes",
            hint="sample without them, or set engine.type = 'sglang'",
        )
    sampling = {
        "max_tokens": params["max_new_tokens"],
        "temperature": params["temperature"],
        "stop_token_ids": params["stop_token_ids"],
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }
    if "sampling_seed" in params:
        sampling["seed"] = params["sampling_seed"]
    return {"request_id": body["rid"], "token_ids": body["input_ids"], "sampling_params": sampling}


def _logprob(score: Mapping[str, Any]) -> float:
    value = float(score["logprob"])
    return math.nan if value <= NO_LOGPROB else value
