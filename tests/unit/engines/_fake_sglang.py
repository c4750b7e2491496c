"""A stand-in for SGLang and its router: the real wire contract, made-up tokens, faults on demand.

What it answers was read off SGLang 0.5.21 and sglang-router 0.3.2; test_contract.py holds the real
ones to the same behaviour where they are installed.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, web

from swerl.engines._sglang_client import HttpEngine, connect
from swerl.engines._sglang_pool import ClientSettings
from swerl.engines._sglang_wire import ServedShape

VOCAB, CONTEXT, EOS = 512, 1024, 2
LAYERS, TOP_K, EXPERTS = 3, 2, 8
SHAPE = ServedShape(VOCAB, LAYERS, TOP_K, EXPERTS)
TOKEN_S = 0.0005
HOLD_S = 3600.0

Fault = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(eq=False)
class Running:
    """One request that is being answered."""

    body: dict[str, Any]
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    aborted: bool = False


class FakeServer:
    """One server. `url` is set while it serves."""

    def __init__(self, model: Path) -> None:
        self.url = ""
        self.model = model
        self.version = "default"
        self.paused = False
        self.running: dict[str, Running] = {}
        self.headers: list[dict[str, str]] = []
        """Headers of every /generate."""
        self.paths: list[str] = []
        """Every requested path."""
        self.fault: Fault | None = None
        """Changes the answer of a /generate."""
        self.unresponsive = False
        """Never answers, though it takes connections."""
        self.stuck = False
        """Its HTTP process answers, the process behind it does not."""
        self.refuses_weights = False
        self.lies_about_version: str | None = None
        self.release = "0.5.21"
        self.routes_experts = False
        self.dp_size = 1
        """Parts of attention's data, as `--enable-dp-attention` makes them."""
        self.session = False
        """True while a weight update is open."""
        self.held: dict[str, str] = {}
        """Parameter -> checksum, of what was sent to it."""
        self.released: set[str] = set()
        self.device = "cpu"
        self._seen: list[list[int]] = []
        self._site: web.TCPSite | None = None
        self._runner: web.AppRunner | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/update_weights_from_disk", self._update),
            web.post("/begin_weight_update", self._begin),
            web.post("/end_weight_update", self._end),
            web.post("/update_weights_from_tensor", self._take),
            web.post("/update_weight_version", self._name),
            web.post("/weights_checker", self._check),
            web.post("/flush_cache", self._flush),
            web.post("/release_memory_occupation", self._release),
            web.post("/resume_memory_occupation", self._reclaim),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
            web.get("/health", self._health),
        ]

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        app = web.Application(middlewares=[self._note], client_max_size=2**26)
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await self._site.start()
        host, found = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{found}"

    async def stop(self) -> None:
        """End as a killed server does: its connections close without an answer."""
        if self._runner:
            for connection in list(self._runner.server.connections):  # type: ignore[union-attr]
                if connection.transport:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Come up again at the same address, with the weights it was launched with."""
        port = int(self.url.rpartition(":")[2])
        await self.stop()
        self.version, self.paused, self.running = "default", False, {}
        self.session, self.released = False, set()
        self._seen = []
        await self.start(port)

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.paths.append(request.path)
        if self.unresponsive or (self.stuck and request.path in ("/generate", "/server_info")):
            await asyncio.sleep(HOLD_S)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.headers.append(dict(request.headers))
        if problem := _problem(body):
            return web.json_response({"error": {"message": problem}}, status=400)
        one = Running(body)
        self.running[body["rid"]] = one
        try:
            finish = await self._sample(one)
        finally:
            del self.running[body["rid"]]
        answer = self._answer(one, finish)
        return web.json_response(self.fault(answer) if self.fault else answer)

    async def _sample(self, one: Running) -> dict[str, Any]:
        params = one.body["sampling_params"]
        stops = {EOS, *params.get("stop_token_ids", ())}
        lowest = EOS + 1 if len(stops) > 1 else 16
        while True:
            await asyncio.sleep(TOKEN_S)
            if one.aborted:
                return {"type": "abort", "message": "Aborted"}
            if self.paused:
                continue
            if not one.spans or one.spans[-1][0] != self.version:
                one.spans.append((self.version, len(one.ids)))
            whole = [*one.body["input_ids"], *one.ids]
            one.ids.append(lowest + _draw(self.model, whole) % (VOCAB - lowest))
            if one.ids[-1] in stops:
                return {"type": "stop", "matched": one.ids[-1]}
            if len(one.ids) == params["max_new_tokens"]:
                return {"type": "length", "length": len(one.ids)}

    def _answer(self, one: Running, finish: dict[str, Any]) -> dict[str, Any]:
        prompt = one.body["input_ids"]
        spans = one.spans or [(self.version, 0)]
        ends = [start for _, start in spans[1:]] + [len(one.ids)]
        meta: dict[str, Any] = {
            "id": one.body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(one.ids),
            "cached_tokens": self._cached(prompt),
            "weight_version": self.version,
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(spans, ends, strict=True)
            ],
            "output_token_logprobs": [[-1.5, token, None] for token in one.ids],
        }
        if one.body.get("return_routed_experts") and self.routes_experts:
            start = one.body.get("routed_experts_start_len", 0)
            meta["routed_experts"] = experts(start, len(prompt) + len(one.ids) - 1)
        self._seen.append(prompt + one.ids)
        return {"text": "", "output_ids": one.ids, "meta_info": meta}

    def _cached(self, prompt: list[int]) -> int:
        def shared(seen: list[int]) -> int:
            pairs = zip(prompt[:-1], seen[:-1], strict=False)
            return next(
                (n for n, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(seen)) - 1
            )

        return max(map(shared, self._seen), default=0)

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        for name, one in self.running.items():
            one.aborted = one.aborted or name.startswith(rid)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        self.paused = True
        for one in self.running.values():
            one.aborted = one.aborted or mode == "abort"
        return web.json_response({"status": "ok", "message": f"Paused, {mode}."})

    async def _continue(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok", "message": "Generation continued."})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        folder = Path(body["model_path"])
        if self.refuses_weights or not folder.is_dir():
            refusal = {"success": False, "message": f"Failed to load {folder}."}
            return web.json_response(refusal, status=400)
        self.model, self.version = folder, self.lies_about_version or body["weight_version"]
        if body["flush_cache"]:
            self._seen = []
        return web.json_response({"success": True, "message": "Succeeded."})

    async def _begin(self, request: web.Request) -> web.Response:
        if self.session:
            return _refusal("a weight-update session is already open; call end_weight_update()")
        self.session = True
        return _success()

    async def _end(self, request: web.Request) -> web.Response:
        if not self.session:
            return _refusal("no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return _success()

    async def _take(self, request: web.Request) -> web.Response:
        """Take checksums where the real one takes handles of memory."""
        if not self.session:
            return _refusal("update_weights_from_tensor must run between begin_weight_update()")
        if self.refuses_weights:
            return _refusal("size mismatch")
        for text in (await request.json())["serialized_named_tensors"]:
            self.held |= dict(pair.split("=") for pair in text.split(","))
        return _success()

    async def _name(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False  # the real one ends every request by default
        self.version = self.lies_about_version or body["new_version"]
        return _success()

    async def _check(self, request: web.Request) -> web.Response:
        place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_size": self.dp_size}
        rank = {"checksums": self.held, "parallelism_info": [place]}
        return web.json_response({"success": True, "message": "Success.", "ranks": [rank]})

    async def _flush(self, request: web.Request) -> web.Response:
        self._seen = []
        return web.Response(text="Cache flushed.\n")

    async def _release(self, request: web.Request) -> web.Response:
        assert self.paused, "release_memory_occupation should be called only when server is idle."
        self.released |= set((await request.json())["tags"])
        return web.json_response(None)

    async def _reclaim(self, request: web.Request) -> web.Response:
        for tag in (await request.json())["tags"]:
            self.released.remove(tag)  # the real one dies, too, of a tag that was not released
        return web.json_response(None)

    async def _model_info(self, request: web.Request) -> web.Response:
        info = {"model_path": str(self.model), "weight_version": self.version}
        return web.json_response(info)

    async def _server_info(self, request: web.Request) -> web.Response:
        body = {
            "version": self.release,
            "tp_size": 1,
            "pp_size": 1,
            "dtype": "auto",
            "device": self.device,
        }
        return web.json_response(body)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()


class FakeRouter:
    """A router with the `manual` policy: it keeps a routing key on one server."""

    def __init__(self, servers: Sequence[FakeServer]) -> None:
        self.url = ""
        self.servers = list(servers)
        self._homes: dict[str, FakeServer] = {}

    async def start(self, port: int = 0) -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.add_routes([
            web.get("/workers", self.workers),
            web.post("/generate", self.forward),
        ])  # fmt: skip
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        host, found = runner.addresses[0][:2]
        self.url = f"http://{host}:{found}"
        return runner

    async def workers(self, request: web.Request) -> web.Response:
        listed = [{"id": one.url.rpartition(":")[2], "url": one.url} for one in self.servers]
        return web.json_response({"workers": listed, "total": len(listed)})

    async def forward(self, request: web.Request) -> web.Response:
        if not self.servers:
            return _unrouted("no_available_workers", 503)
        home = self._home(request.headers.get("X-SMG-Routing-Key", ""))
        raw = await request.read()
        try:
            async with (
                ClientSession() as client,
                client.post(home.url + "/generate", data=raw, headers=request.headers) as answer,
            ):
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type="application/json"
                )
        except (OSError, ClientError):
            return _unrouted("call_upstream_request_error", 500)

    def _home(self, key: str) -> FakeServer:
        """Return a key's server; a key without one goes where the fewest are."""
        if self._homes.get(key) not in self.servers:
            homes = list(self._homes.values())
            self._homes[key] = min(self.servers, key=homes.count)
        return self._homes[key]


def _unrouted(code: str, status: int) -> web.Response:
    return web.json_response({"error": {"code": code, "message": ""}}, status=status)


@asynccontextmanager
async def fakes(
    model: Path, count: int, kind: type[FakeServer] | None = None
) -> AsyncIterator[list[FakeServer]]:
    """Run several fake servers."""
    async with AsyncExitStack() as stack:
        servers = [(kind or FakeServer)(model) for _ in range(count)]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        yield servers


@asynccontextmanager
async def opened(
    servers: list[FakeServer], settings: ClientSettings | None = None
) -> AsyncIterator[HttpEngine]:
    """Connect to fake servers."""
    urls = [server.url for server in servers]
    async with connect(urls, shape=SHAPE, settings=settings) as engine:
        yield engine


@asynccontextmanager
async def fake_router(servers: list[FakeServer]) -> AsyncIterator[FakeRouter]:
    """Run a router in front of fake servers."""
    router = FakeRouter(servers)
    runner = await router.start()
    try:
        yield router
    finally:
        await runner.cleanup()


def experts(start: int, end: int) -> str:
    """Return what a server says of these positions: base64 of int32 [positions, layers, top k]."""
    ids = [
        (p + layer + k) % EXPERTS
        for p in range(start, end)
        for layer in range(LAYERS)
        for k in range(TOP_K)
    ]
    return base64.b64encode(array("i", ids).tobytes()).decode()


def _success() -> web.Response:
    return web.json_response({"success": True, "message": "Success"})


def _refusal(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


def _problem(body: dict[str, Any]) -> str | None:
    ids, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
    if not ids:
        return "input_ids cannot be empty."
    if len(ids) + wanted > CONTEXT:
        return f"{len(ids)} input tokens and {wanted} new ones exceed the context length {CONTEXT}."
    return None


def _draw(model: Path, ids: list[int]) -> int:
    seed = f"{model}\0".encode() + struct.pack(f"{len(ids)}i", *ids)
    return int.from_bytes(hashlib.blake2b(seed, digest_size=4).digest())
