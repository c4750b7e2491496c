"""The CPU server of a dense model: a process that implements SGLang's HTTP contract.

`python -m swerl.engines._torch_server --model DIR --ready-file FILE …` writes the port to FILE as
JSON once it serves requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import numpy as np
import orjson
from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from swerl.core.chat import Json
from swerl.core.errors import EngineError, SwerlError
from swerl.core.files import write_text
from swerl.engines._sglang_wire import PauseMode
from swerl.engines._torch_batch import MAX_STOP_IDS, FinishedReply, ReplyRequest, RunningBatch
from swerl.engines._torch_model import DenseModel, DenseShape, read_shape, read_weights

NUM_BUSY_SPANS = 4096
"""Spans of work that are kept: more than one training step makes."""
MERGED_GAP_S = 1e-3
"""A shorter pause between two steps counts as work: the server answers HTTP in it."""

LARGE = 10**7
"""Parameters from which on a step runs in a thread, so that HTTP is answered meanwhile. A small
model's step is too short for that."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """The batch, the requests that wait for it, and the HTTP routes."""

    def __init__(self, model_dir: Path, *, num_rows: int, max_running: int, context: int) -> None:
        shape = read_shape(model_dir)
        context = min(context, shape.max_positions)
        model = DenseModel(shape, read_weights(model_dir, shape), context + 1)
        self.batch = RunningBatch(
            model, num_rows=num_rows, max_running=max_running, context=context
        )
        self.model_dir = model_dir
        self._replies: dict[str, asyncio.Future[FinishedReply]] = {}
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held during a step and every change of the batch."""
        self._seeds = np.random.default_rng()
        self._busy_spans: deque[tuple[float, float]] = deque(maxlen=NUM_BUSY_SPANS)
        self._started = time.monotonic()

    async def step_forever(self) -> None:
        """Step the batch whenever there is work."""
        while True:
            if not self.batch.has_work:
                self._wake.clear()
                await self._wake.wait()
                continue
            started = time.monotonic()
            async with self._turn:
                if self.batch.paused:  # while this waited for its turn
                    continue
                step, is_large = self.batch.step, self.batch.model.weights.num_params > LARGE
                self._settle(await asyncio.to_thread(step) if is_large else step())
            ended = time.monotonic()
            if self._busy_spans and started - self._busy_spans[-1][1] < MERGED_GAP_S:
                started, _ = self._busy_spans.pop()
            self._busy_spans.append((started, ended))
            await asyncio.sleep(0)

    def routes(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_json], client_max_size=256 * 2**20)
        app.add_routes([
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/update_weights_from_disk", self._update_from_disk),
            web.get("/health", self._health),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
        ])  # fmt: skip
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        body = await read_body(http, GenerateBody)
        if body.rid in self._replies:
            raise BadRequestError(f"rid {body.rid!r} is already being generated")
        seed = int(self._seeds.integers(2**63))
        shape = self.batch.model.shape
        request = to_request(body, shape=shape, context=self.batch.context, free_seed=seed)
        ended = await self._sample(request)
        return _json(reply(ended, self.batch.version, body.return_logprob))

    async def _sample(self, request: ReplyRequest) -> FinishedReply:
        """Queue a request and wait for its end; it is aborted if its client disconnects."""
        future: asyncio.Future[FinishedReply] = asyncio.get_running_loop().create_future()
        self._replies[request.rid] = future
        try:
            async with self._turn:
                self.batch.add(request)
            self._wake.set()
            return await future
        except asyncio.CancelledError:
            async with self._turn:
                self.batch.abort(lambda other: other is request)
            raise
        finally:
            del self._replies[request.rid]

    def _settle(self, ended: list[FinishedReply]) -> None:
        for one in ended:
            future = self._replies.get(one.request.rid)
            if future and not future.done():
                future.set_result(one)

    async def _abort(self, http: web.Request) -> web.Response:
        body = await read_body(http, AbortBody)
        async with self._turn:
            self._settle(self.batch.abort(lambda r: r.rid == body.rid))
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        body = await read_body(http, PauseBody)
        async with self._turn:
            self._settle(self.batch.pause(PauseMode(body.mode)))
        return _json({"status": "ok", "message": "Generation is paused."})

    async def _continue(self, http: web.Request) -> web.Response:
        self.batch.resume()
        self._wake.set()
        return _json({"status": "ok", "message": "Generation continues."})

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        """Replace all weights or none."""
        body = await read_body(http, UpdateBody)
        batch = self.batch
        if not batch.paused and (batch.num_running or batch.num_waiting):
            raise BadRequestError("requests are in flight; pause generation before the update")
        weights = read_weights(Path(body.model_path), batch.model.shape)
        if not body.flush_cache:
            raise BadRequestError("flush_cache must be true: cached keys belong to the old weights")
        async with self._turn:
            batch.set_weights(weights, body.weight_version or batch.version)
        self.model_dir = Path(body.model_path)
        message = f"Serving {body.model_path} as version {batch.version}."
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, http: web.Request) -> web.Response:
        return _json({
            "model_path": str(self.model_dir),
            "is_generation": True,
            "weight_version": self.batch.version,
            "checksum": self.batch.model.weights.checksum,
            "vocab_size": self.batch.model.shape.plan.vocab_size,
            "context_length": self.batch.context,
        })  # fmt: skip

    async def _server_info(self, http: web.Request) -> web.Response:
        return _json({
            **asdict(self.batch.counters),
            "busy_spans": [list(span) for span in self._busy_spans],
            "uptime_s": time.monotonic() - self._started,
            "num_running": self.batch.num_running,
            "num_waiting": self.batch.num_waiting,
            "paused": self.batch.paused,
            "weight_version": self.batch.version,
        })  # fmt: skip


def _json(body: Json, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except SwerlError as error:
        body: Json = {"success": False, "message": str(error), "error": {"message": str(error)}}
        return _json(body, status=400)


class BadRequestError(EngineError):
    """A request that this server cannot serve."""


class SamplingBody(BaseModel):
    """`sampling_params`; an unknown key is refused, never ignored."""

    model_config = {"extra": "forbid"}

    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)


class GenerateBody(BaseModel):
    input_ids: list[int] = Field(min_length=1)
    rid: str = Field(default_factory=lambda: uuid4().hex)
    sampling_params: SamplingBody = SamplingBody()
    return_logprob: bool = False


class AbortBody(BaseModel):
    rid: str


class PauseBody(BaseModel):
    mode: PauseMode = PauseMode.ABORT


class UpdateBody(BaseModel):
    model_path: str
    flush_cache: bool = True
    weight_version: str | None = None


Body = TypeVar("Body", bound=BaseModel)


async def read_body(http: web.Request, kind: type[Body]) -> Body:
    """Parse a request's JSON. Raises BadRequestError that names the first wrong field."""
    try:
        return kind.model_validate_json(await http.read() or b"{}")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRequestError(f"{field}: {first['msg']}") from error


def to_request(
    body: GenerateBody, *, shape: DenseShape, context: int, free_seed: int
) -> ReplyRequest:
    """Check a body against the model. `free_seed` is used if the client sets none."""
    sampling = body.sampling_params
    size = shape.plan.vocab_size
    if unknown := [i for i in body.input_ids if not 0 <= i < size]:
        raise BadRequestError(f"input id {unknown[0]} is outside the vocabulary of {size}")
    total = len(body.input_ids) + sampling.max_new_tokens
    if total > context:
        raise BadRequestError(
            f"{len(body.input_ids)} input ids plus {sampling.max_new_tokens} new tokens exceed "
            f"the context length of {context}"
        )
    stop_ids = set(sampling.stop_token_ids or ()) | set(shape.eos_ids)
    if len(stop_ids) > MAX_STOP_IDS:
        raise BadRequestError(f"{len(stop_ids)} stop ids; at most {MAX_STOP_IDS} are supported")
    seed = free_seed if sampling.sampling_seed is None else sampling.sampling_seed
    return ReplyRequest(
        rid=body.rid,
        ids=tuple(body.input_ids),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_ids=tuple(sorted(stop_ids)),
        seed=seed % 2**64,
    )


def reply(ended: FinishedReply, version: str, return_logprob: bool) -> Json:
    """Build the body of a finished /generate. `version` is for a request that never ran."""
    num_output = len(ended.output_ids)
    finish: Json = {"type": "abort", "message": "Aborted"}
    if ended.reason == "stop":
        finish = {"type": "stop", "matched": ended.output_ids[-1]}
    elif ended.reason == "length":
        finish = {"type": "length", "length": ended.request.max_new_tokens}
    spans = ended.versions or ((version, 0),)
    ends = [start for _, start in spans[1:]] + [num_output]
    meta: dict[str, Json] = {
        "id": ended.request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(ended.request.ids),
        "completion_tokens": num_output,
        "cached_tokens": ended.cached_tokens,
        "weight_version": spans[-1][0],
        "weight_versions": [
            {"version": name, "start": start, "end": end}
            for (name, start), end in zip(spans, ends, strict=True)
        ],
    }
    if return_logprob:
        pairs = zip(ended.logprobs, ended.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {"text": "", "output_ids": list(ended.output_ids), "meta_info": meta}


def main() -> int:
    """Serve until terminated. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--ready-file", type=Path, required=True, help="gets the port when ready")
    parser.add_argument("--max-running", type=int, required=True, help="most concurrent requests")
    parser.add_argument("--num-rows", type=int, required=True, help="most cached sequences")
    parser.add_argument("--context-length", type=int, required=True, help="most tokens of one")
    args = parser.parse_args()
    try:
        asyncio.run(_serve(args))
    except (SwerlError, OSError) as error:
        hint = error.hint if isinstance(error, SwerlError) else ""
        sys.stderr.write(f"error: {error}\n" + (f"hint: {hint}\n" if hint else ""))
        return 1
    return 0


async def _serve(args: argparse.Namespace) -> None:
    app = App(
        args.model,
        num_rows=max(args.num_rows, args.max_running),
        max_running=args.max_running,
        context=args.context_length,
    )
    runner = web.AppRunner(app.routes(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready = {"port": runner.addresses[0][1], "pid": os.getpid()}
    write_text(args.ready_file, json.dumps(ready))
    await app.step_forever()


if __name__ == "__main__":
    sys.exit(main())
