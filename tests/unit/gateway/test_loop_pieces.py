"""No request holds the event loop for more than 20 ms of CPU time, whatever is in it.

The CPU time of each callback is measured, because a busy machine only adds wall time.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from swerl.core.chat import Message, Role
from swerl.core.turn import Sampling
from swerl.gateway import limits
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.test_large_requests import COUNT, LISTS, short_messages

MOST_S = 0.020
FIXED_WORK_S = 0.002
"""CPU time of `fixed_work` on the machine that the bound is for."""
TRIES = 3
"""A callback is too long if it is so in each try: a page fault or a cold cache is not its own."""
UNRENDERED_BYTES = 400_000
"""Requests above this are large for every step, so their prompts need not be made."""
FREE = SessionLimits(max_turns=10**6, max_context_tokens=10**8, max_sampled_tokens=10**9)
MESSAGES, CHAT, RESPONSES = LISTS
WORDS = "The quick brown fox jumps over the lazy dog. "
HI = [{"role": "user", "content": "hi"}]
DEEP = b'{"a":' * 300 + b"{}" + b"}" * 300


def tools(number: int, size: int) -> list[Any]:
    properties = {f"p{n}": {"type": "string", "description": "of a tool"} for n in range(size)}
    schema = {"type": "object", "properties": properties}
    return [{"name": f"t{n}", "description": "", "input_schema": schema} for n in range(number)]


def calls(number: int, arguments: Any) -> list[Any]:
    """A conversation with so many calls."""
    uses = [
        {"type": "tool_use", "id": f"a{n}", "name": "t", "input": arguments} for n in range(number)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": f"a{n}", "content": "ok"} for n in range(number)
    ]
    return [*HI, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]


def chat_call(written: str) -> list[Any]:
    call = {"id": "a", "type": "function", "function": {"name": "t", "arguments": written}}
    result = {"role": "tool", "tool_call_id": "a", "content": "ok"}
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def body(items: Any = HI, **fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "max_tokens": 10**6, "messages": items, **fields})


def values(number: int) -> Any:
    return {"role": "user", "content": [{"type": "text", "text": "x"}] * number}


KNOWN = [*HI, {"role": "assistant", "content": "ok"}, *HI]
"""The beginning of a request that the Session knows."""
CORPUS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "300,000 messages": (COUNT, lambda: body(short_messages(300_000))),
    "9,999 messages": (CHAT, lambda: body(short_messages(9_999))),
    "999 messages": (MESSAGES, lambda: body(short_messages(999))),
    "300 messages": (CHAT, lambda: body(short_messages(300))),
    "a text": (COUNT, lambda: body([{"role": "user", "content": WORDS * 300_000}])),
    "a text below the bound": (COUNT, lambda: body([{"role": "user", "content": WORDS * 430}])),
    "a system prompt": (MESSAGES, lambda: body(system=WORDS * 2_000)),
    "thinking": (
        MESSAGES,
        lambda: body(
            [*HI, {"role": "assistant", "content": [
                {"type": "thinking", "thinking": WORDS * 2_000, "signature": ""},
                {"type": "text", "text": "a"},
            ]}, *HI]
        ),
    ),
    "arguments": (MESSAGES, lambda: body(calls(1, {"x": WORDS * 2_000}))),
    "arguments with values": (MESSAGES, lambda: body(calls(1, {"x": [{"a": 1}] * 49_000}))),
    "arguments below the bound": (MESSAGES, lambda: body(calls(1, {"x": [{"a": 1}] * 4_900}))),
    "arguments in a text": (CHAT, lambda: body(chat_call(json.dumps({"x": [[]] * 250_000})))),
    "calls": (MESSAGES, lambda: body(calls(1_200, {}))),
    "1,000 tools": (MESSAGES, lambda: body(tools=tools(1_000, 30))),
    "100 tools": (MESSAGES, lambda: body(tools=tools(100, 30))),
    "a tool's description": (
        COUNT,
        lambda: body(tools=[{**tools(1, 0)[0], "description": WORDS * 300_000}]),
    ),
    "deep tools": (
        MESSAGES,
        lambda: body(tools=[{"name": f"t{n}", "input_schema": "@"} for n in range(300)]).replace(
            b'"@"', DEEP
        ),
    ),
    "deep JSON": (COUNT, lambda: b'{"model":"m","messages":' + b"[" * 5_000_000),
    "escapes": (COUNT, lambda: b'{"model":"' + b"\\n" * 400_000),
    "half pairs": (COUNT, lambda: body([{"role": "user", "content": "@"}]).replace(
        b"@", b"\\ud83d" * 150_000)),
    "empty lists": (COUNT, lambda: b'{"messages":[' + b"[]," * 340_000 + b"[]]}"),
    "values": (COUNT, lambda: body(metadata=[[] for _ in range(99_000)])),
    "keys": (COUNT, lambda: body(**{f"k{n}": {} for n in range(90_000)})),
    "blocks": (MESSAGES, lambda: body(
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * 3_300}])),
    "a history with values": (MESSAGES, lambda: body([*KNOWN, values(33_000)])),
    "a history with messages": (MESSAGES, lambda: body([*KNOWN, *short_messages(5_000)])),
    "packed": (COUNT, lambda: gzip.compress(body(short_messages(300_000)))),
    "a reply": (MESSAGES, body),
    "a stream": (MESSAGES, lambda: body(stream=True)),
    "a stream of chat": (CHAT, lambda: body(stream=True)),
}  # fmt: skip


def fixed_work() -> None:
    packed = orjson.dumps([{"a": n, "b": [str(n)] * 3} for n in range(3000)])
    sum(len(each["b"]) + each["a"] for each in orjson.loads(packed))


def allowed_s() -> float:
    """Return the bound for this machine."""
    times = []
    for _ in range(5):
        began_s = time.thread_time()
        fixed_work()
        times.append(time.thread_time() - began_s)
    return MOST_S * max(1.0, min(times) / FIXED_WORK_S)


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Yield the longest CPU time of a callback of this thread's event loop, by its text."""
    longest, here, run = dict[str, float](), threading.get_ident(), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != here:
            run(handle)
            return
        began_s = time.thread_time()
        run(handle)
        took_s = time.thread_time() - began_s
        if took_s > max(longest.values(), default=0.0):
            longest.clear()
            longest[repr(handle)] = took_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield longest


def ask(url: str, key: str, path: str, packed: bytes, name: str) -> int:
    """Ask in a thread of its own: a client's work is not the gateway's."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    headers = {"Authorization": f"Bearer {key}"}
    if name == "packed":
        headers["Content-Encoding"] = "gzip"
    try:
        connection.request("POST", path, packed, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@pytest.mark.parametrize("name", CORPUS)
async def test_no_request_holds_the_event_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_REST", 0.0)  # it delays a Session and nobody else
    engine, found = RecordingEngine(), list[dict[str, float]]()
    path, make = CORPUS[name]
    packed, sampling = make(), Sampling(10**6)
    if len(packed) > UNRENDERED_BYTES:
        monkeypatch.setattr(type(engine.family), "render", lambda *_: [1])
    is_short = name not in ("a reply", "a stream", "a stream of chat")
    reply = engine.family.encode_reply(Message(Role.ASSISTANT, "ok" if is_short else WORDS * 2_000))
    gc.collect()
    gc.freeze()  # a collection of the test process is no work of the gateway
    try:
        async with Gateway(engine=engine, family=engine.family) as gateway:
            for number in range(TRIES):
                engine.lines = [reply, reply]
                session = gateway.open(str(number), sampling=sampling, limits=FREE)
                if "history" in name:
                    asked = session.url, session.key, path, body(KNOWN), name
                    await asyncio.to_thread(ask, *asked)
                with measured() as longest:
                    status = await asyncio.to_thread(
                        ask, session.url, session.key, path, packed, name
                    )
                    await session.close()
                found.append(longest)
                if max(longest.values()) <= allowed_s():
                    break
            else:
                pytest.fail(f"{found}: more than {allowed_s():.3f} s")
    finally:
        gc.unfreeze()

    assert status in (200, 400, 413)
