"""A RecordingEngine behind a URL: a fake that speaks SGLang's HTTP contract."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from swerl.core.chat import Finish
from swerl.core.turn import Completion, Sampling
from tests.unit.gateway._fakes import RecordingEngine


class WireEngine:
    """Serves an engine. Each request is a session: the wire format does not carry ours.

    An engine's routed experts are sent as SGLang sends them: base64 of int32.
    """

    def __init__(self, engine: RecordingEngine) -> None:
        self.engine = engine
        self.aborted: list[str] = []
        self.url = ""
        self._running: dict[str, asyncio.Task[Completion]] = {}

    def routes(self) -> web.Application:
        """Return the HTTP application."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/health", self._info)
        return app

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = Sampling(
            body["sampling_params"]["max_new_tokens"],
            num_routed=body.get("routed_experts_start_len", 0),
        )
        spoken = self.engine.generate(body["input_ids"], sampling, body["rid"])
        self._running[body["rid"]] = task = asyncio.create_task(spoken)
        try:
            done = await task
        except asyncio.CancelledError:
            done = Completion((), (), Finish.ABORT, "v1")
        finally:
            del self._running[body["rid"]]
        pairs = [[logprob, one, None] for one, logprob in zip(done.ids, done.logprobs, strict=True)]
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": str(done.finish)},
            "weight_version": "v1",
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(done.ids),
            "cached_tokens": 0,
            "output_token_logprobs": pairs,
        }
        if done.routed:
            assert body["return_routed_experts"]
            numbers = array("i", list(done.routed.data))
            meta["routed_experts"] = base64.b64encode(numbers.tobytes()).decode()
        return web.json_response({"output_ids": list(done.ids), "meta_info": meta})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self._running:
            self._running[rid].cancel()
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "v1", "model_path": "none"})


@asynccontextmanager
async def wired(engine: RecordingEngine) -> AsyncIterator[WireEngine]:
    """Serve the engine on a free port of the loopback interface."""
    wire = WireEngine(engine)
    runner = web.AppRunner(wire.routes(), handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    wire.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield wire
    finally:
        await runner.cleanup()
