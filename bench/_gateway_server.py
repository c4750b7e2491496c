"""The other processes of bench/gateway.py: the gateway under test, and an engine without a model.

    python bench/_gateway_server.py url    MODEL SESSIONS URL LOG_DIR
    python bench/_gateway_server.py floor  MODEL SESSIONS URL LOG_DIR
    python bench/_gateway_server.py engine MODEL REPLY_S

Each prints its address in one line of JSON, answers the words on its standard input with such
lines, and ends when that closes. MODEL is a folder, or `-` for the tiny family.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from swerl.core import plugins
from swerl.core.chat import Finish, Message, Role, ToolCall
from swerl.core.contracts import EngineSetup, Family
from swerl.core.turn import Completion, Sampling
from swerl.engines import sglang
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session

LIMITS = SessionLimits(max_turns=10_000, requests_per_minute=10**6, max_context_tokens=10**6)
CALL = ToolCall("", "Tool1", {"command": "sed -n 1,40p src/main.py && grep -rn def . " * 3})


class Instant:
    """An engine that returns the same reply and ignores the prompt."""

    def __init__(self, family: Family) -> None:
        self._ids = tuple(family.encode_reply(Message(Role.ASSISTANT, tool_calls=(CALL,))))
        self._logprobs = (-0.5,) * len(self._ids)

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        """Return the reply."""
        return Completion(self._ids, self._logprobs, Finish.STOP, "v1", len(ids), len(ids) - 1)

    async def abort(self, session: str) -> None:
        """Nothing runs."""


def main() -> None:
    """Run the process that the first argument names."""
    kind, model, *rest = sys.argv[1:]
    family = name_of(model), None if model == "-" else Path(model)
    match kind:
        case "url":
            asyncio.run(behind_url(*family, int(rest[0]), rest[1], Path(rest[2])))
        case "floor":
            asyncio.run(floor(build(*family), rest[1]))
        case "engine":
            asyncio.run(engine(*family, float(rest[0])))


def name_of(model: str) -> str:
    """Return the family of a model folder."""
    return "tiny" if model == "-" else "qwen3"


def build(name: str, model: Path | None) -> Family:
    """Build a family."""
    family: Family = plugins.load("families", name).build(model)
    return family


async def behind_url(
    name: str, model: Path | None, num_sessions: int, url: str, log_dir: Path
) -> None:
    """Run a gateway with its engine behind a URL."""
    family = build(name, model)
    setup = EngineSetup(family, log_dir, model)
    async with (
        sglang.open(sglang.Options(url=url), setup) as engine,
        Gateway(engine=engine, family=family) as gateway,
    ):
        await _work(gateway.open, family, num_sessions, [os.getpid()])


async def floor(family: Family, url: str) -> None:
    """Serve only what no gateway can leave out: parse, send as many ids to the engine, answer."""
    call = {"type": "tool_use", "id": "one", "name": CALL.name, "input": {}}
    written = {"type": "input_json_delta", "partial_json": orjson.dumps(CALL.arguments).decode()}
    chars_per_token = _chars_per_token(family)

    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        orjson.loads(body)
        num_ids = int(len(body) / chars_per_token)
        ids = orjson.dumps({"input_ids": list(range(num_ids))})
        async with http.post(f"{url}/generate", data=ids) as reply:
            orjson.loads(await reply.read())
        usage = {"input_tokens": num_ids, "cache_read_input_tokens": 0}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {"usage": usage}},
            {"type": "content_block_start", "content_block": call},
            {"type": "content_block_delta", "delta": written},
        ]
        return web.Response(body=b"".join(b"data: %s\n\n" % orjson.dumps(e) for e in events))

    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    async with aiohttp.ClientSession() as http:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports = [address[1] for address in runner.addresses]
        _print({"ports": ports, "pids": [os.getpid()], "chars_per_token": chars_per_token})
        await asyncio.to_thread(sys.stdin.readline)


def _chars_per_token(family: Family) -> float:
    source = Path(asyncio.base_events.__file__).read_text(encoding="utf-8")[:20_000]
    return len(source) / (len(family.encode_reply(Message(Role.ASSISTANT, source))) - 1)


async def _work(open_one: Any, family: Family, num_sessions: int, pids: list[int]) -> None:
    """Serve each session on its own socket, as for a sandbox, until standard input closes."""
    sessions: list[Session] = []
    ports = []
    for number in range(num_sessions):
        session = open_one(str(number), sampling=Sampling(4096), limits=LIMITS)
        sock = socket.create_server(("127.0.0.1", 0), backlog=16)
        ports.append(sock.getsockname()[1])
        await session.attach(sock)
        sessions.append(session)
    _print({"ports": ports, "pids": pids, "chars_per_token": _chars_per_token(family)})
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if word == "close":
            began = time.perf_counter()
            trees = await asyncio.gather(*(session.close() for session in sessions))
            turns = sum(len(tree.turns) for tree in trees)
            _print({"turns": turns, "close_s": time.perf_counter() - began})


async def engine(name: str, model: Path | None, reply_s: float) -> None:
    """Serve an engine that answers each request with the same bytes after `reply_s` seconds."""
    done = await Instant(build(name, model)).generate([0], Sampling(1), "")
    pairs = [[value, one, None] for one, value in zip(done.ids, done.logprobs, strict=True)]
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": "v1",
        "output_token_logprobs": pairs,
    }
    answer = json.dumps({"output_ids": list(done.ids), "meta_info": meta}).encode()
    info = json.dumps({"weight_version": "v1"}).encode()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Canned(answer, info, reply_s), "127.0.0.1", 0, backlog=1024
    )
    _print({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
    await asyncio.to_thread(sys.stdin.readline)


class _Canned(asyncio.Protocol):
    """HTTP for one client with kept-alive connections: counts bytes and answers."""

    def __init__(self, answer: bytes, info: bytes, reply_s: float) -> None:
        self._answer, self._info, self._reply_s = answer, info, reply_s
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
            if not self._missing:
                self._sample()
            return
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            return
        self._head = b""
        if head.startswith(b"GET /model_info"):
            self._reply(self._info)
        elif head.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._missing = int(length) - len(rest)
            if not self._missing:
                self._sample()

    def _sample(self) -> None:
        asyncio.get_running_loop().call_later(self._reply_s, self._reply, self._answer)

    def _reply(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._transport.write(head.encode() + b"\r\n\r\n" + body)


def _print(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
