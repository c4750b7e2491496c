"""The CPU server's HTTP application: the batch, who waits for which reply, and the routes.

One thread does everything: the event loop steps the batch and answers HTTP between steps, so no
request ever sees weights or rows in the middle of a change.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import SwerlError
from swerl.engines._torch_batch import Batch
from swerl.engines._torch_jobs import Ended, PauseMode, Request
from swerl.engines._torch_model import Model, read_shape, read_weights
from swerl.engines._torch_wire import (
    AbortBody,
    BadRequestError,
    CheckBody,
    GenerateBody,
    PauseBody,
    UpdateBody,
    read_body,
    reply,
    to_request,
)

NUM_BUSY_SPANS = 4096
"""Spans of work that are remembered: more than one training step makes."""
MERGED_GAP_S = 1e-3
"""Pauses shorter than this are the server answering HTTP between two steps."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class App:
    """The batch, who waits for which reply, and the routes."""

    def __init__(self, model_dir: Path, *, num_rows: int, max_running: int, context: int) -> None:
        shape = read_shape(model_dir)
        context = min(context, shape.max_positions)
        model = Model(shape, read_weights(model_dir, shape), context + 1)
        self.batch = Batch(model, num_rows=num_rows, max_running=max_running, context=context)
        self.model_dir = model_dir
        self._replies: dict[str, asyncio.Future[Ended]] = {}
        self._wake = asyncio.Event()
        self._seeds = np.random.default_rng()
        self._updating = False
        self._busy_s = 0.0
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
            self._settle(self.batch.step())
            self._note_busy(started, time.monotonic())
            await asyncio.sleep(0)

    def _note_busy(self, started: float, ended: float) -> None:
        """Remember a span of work; steps that follow each other at once are one span."""
        self._busy_s += ended - started
        if self._busy_spans and started - self._busy_spans[-1][1] < MERGED_GAP_S:
            started, _ = self._busy_spans.pop()
        self._busy_spans.append((started, ended))

    def routes(self) -> web.Application:
        """Return the HTTP application."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=256 * 2**20)
        app.add_routes([
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.get("/flush_cache", self._flush),
            web.post("/flush_cache", self._flush),
            web.post("/begin_weight_update", self._begin_update),
            web.post("/end_weight_update", self._end_update),
            web.post("/update_weights_from_disk", self._update_from_disk),
            web.post("/weights_checker", self._check_weights),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
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

    async def _sample(self, request: Request) -> Ended:
        """Queue a request and wait for its end; a client that goes away takes it along."""
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._replies[request.rid] = future
        self.batch.add(request)
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            self.batch.abort(lambda other: other is request)
            raise
        finally:
            del self._replies[request.rid]

    def _settle(self, ended: list[Ended]) -> None:
        for one in ended:
            future = self._replies.get(one.request.rid)
            if future and not future.done():
                future.set_result(one)

    async def _abort(self, http: web.Request) -> web.Response:
        body = await read_body(http, AbortBody)
        self._settle(self.batch.abort(lambda r: body.abort_all or r.rid == body.rid))
        return web.Response()

    async def _pause(self, http: web.Request) -> web.Response:
        body = await read_body(http, PauseBody)
        self._settle(self.batch.pause(PauseMode(body.mode)))
        return _json({"status": "ok", "message": "Generation is paused."})

    async def _continue(self, http: web.Request) -> web.Response:
        self.batch.resume()
        self._wake.set()
        return _json({"status": "ok", "message": "Generation continues."})

    async def _flush(self, http: web.Request) -> web.Response:
        self.batch.flush()
        return web.Response(text="Cache flushed.\n")

    async def _begin_update(self, http: web.Request) -> web.Response:
        if self._updating:
            raise BadRequestError("a weight update is already open; call /end_weight_update first")
        self._updating = True
        return _json({"success": True, "message": "Success"})

    async def _end_update(self, http: web.Request) -> web.Response:
        if not self._updating:
            raise BadRequestError("no weight update is open; call /begin_weight_update first")
        self._updating = False
        return _json({"success": True, "message": "Success"})

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        """Swap the weights whole or not at all; like SGLang's, it needs no begin and end."""
        body = await read_body(http, UpdateBody)
        batch = self.batch
        if not batch.paused and (batch.num_running or batch.num_waiting):
            raise BadRequestError("requests are in flight; pause generation before the update")
        weights = read_weights(Path(body.model_path), batch.model.shape)
        if not body.flush_cache:
            raise BadRequestError("flush_cache must be true: old keys do not fit new weights")
        batch.set_weights(weights, body.weight_version or batch.version)
        self.model_dir = Path(body.model_path)
        message = f"Serving {body.model_path} as version {batch.version}."
        return _json({"success": True, "message": message, "num_paused_requests": 0})

    async def _check_weights(self, http: web.Request) -> web.Response:
        await read_body(http, CheckBody)
        checksum = self.batch.model.weights.checksum
        return _json({"success": True, "message": "Success", "checksum": checksum})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _health_generate(self, http: web.Request) -> web.Response:
        """Sample one token for real, unless paused."""
        if not self.batch.paused:
            rid = f"health-{self._seeds.integers(2**63)}"
            await self._sample(Request(rid=rid, ids=(0,), max_new_tokens=1))
        return web.Response()

    async def _model_info(self, http: web.Request) -> web.Response:
        return _json({
            "model_path": str(self.model_dir),
            "is_generation": True,
            "weight_version": self.batch.version,
            "checksum": self.batch.model.weights.checksum,
            "vocab_size": self.batch.model.shape.vocab,
            "context_length": self.batch.context,
        })  # fmt: skip

    async def _server_info(self, http: web.Request) -> web.Response:
        return _json({
            **asdict(self.batch.counters),
            "busy_s": self._busy_s,
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
