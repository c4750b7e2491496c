"""One request cannot hold the event loop, the memory, or the other Sessions' turn."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from swerl.core.chat import ChatRequest
from swerl.gateway import bodies, history, limits, router
from swerl.gateway.dialects.anthropic import Anthropic
from swerl.gateway.history import MessageTree
from swerl.gateway.limits import LongWork
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession
from tests.unit.gateway.test_server import post

COUNT = "/v1/messages/count_tokens"
LISTS = {"/v1/messages": "messages", "/v1/chat/completions": "messages", "/v1/responses": "input"}


def short_messages(number: int) -> list[Any]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"hi {n}"} for n in range(number)]


async def ask(session: Any, path: str, body: Any) -> tuple[int, Any]:
    packed = body if isinstance(body, bytes) else orjson.dumps(body)
    return await post(session, path, data=packed)


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("depth", [300, 5000])
async def test_a_deep_request_is_refused_in_the_dialects_own_shape(
    open_session: OpenSession, path: str, depth: int
) -> None:
    tool = {"type": "function", "name": "t", "input_schema": "@", "parameters": "@"}
    body = {"model": "m", LISTS[path]: short_messages(1), "tools": [{**tool, "function": tool}]}
    deep = b'{"a":' * depth + b"{}" + b"}" * depth

    status, answer = await ask(open_session(), path, orjson.dumps(body).replace(b'"@"', deep))

    assert status == 400
    assert answer["error"]["message"]


async def test_long_work_leaves_the_event_loop(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step over a request of 9,000 messages runs in a thread, and others are answered."""
    here, threads = threading.get_ident(), dict[str, int]()

    def note(cls: type, name: str) -> None:
        was: Callable[..., Any] = getattr(cls, name)

        def noting(self: Any, request: Any, *rest: Any) -> Any:
            items = request.messages if isinstance(request, ChatRequest) else request["messages"]
            if len(items) > 1000:
                threads[name] = threading.get_ident()
            return was(self, request, *rest)

        monkeypatch.setattr(cls, name, noting)

    note(Anthropic, "parse")
    note(MessageTree, "match")
    note(type(RecordingEngine().family), "render")
    body = {"model": "m", "messages": short_messages(9_001)}
    (status, answer), (small, _) = await asyncio.gather(
        ask(open_session("large"), COUNT, body),
        ask(open_session("small"), COUNT, {"model": "m", "messages": short_messages(1)}),
    )

    assert (status, small) == (200, 200), answer
    assert answer["input_tokens"] > 9_001
    assert set(threads) == {"parse", "match", "render"}
    assert here not in threads.values()


@pytest.mark.parametrize("broken", [b"[" * 5000, b'"' + b"\\n" * 5000, b'"\\ud83d"'])
async def test_a_body_that_is_repaired_or_refused_leaves_the_event_loop(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, broken: bytes
) -> None:
    threads: list[int] = []

    def noting(*packed: Any) -> Any:
        threads.append(threading.get_ident())
        return bodies.read_object(*packed)

    monkeypatch.setattr(router, "read_object", noting)
    await ask(open_session(), COUNT, b'{"model":"m","messages":' + broken + b"}")

    assert threads not in ([], [threading.get_ident()])


async def test_a_session_has_one_piece_of_long_work_even_if_its_client_leaves() -> None:
    long_work, began, gate = LongWork(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        gate.wait()

    cancelled = asyncio.create_task(long_work.run("loud", work))
    await asyncio.to_thread(began.wait)
    cancelled.cancel()
    again = asyncio.create_task(long_work.run("loud", lambda: 7))
    assert await long_work.run("quiet", lambda: 8) == 8
    assert not again.done(), "the thread of the cancelled request still works"
    gate.set()

    assert await again == 7
    with pytest.raises(asyncio.CancelledError):
        await cancelled


@pytest.mark.parametrize("escape", [rb"\u0041", rb"\ud83d\ude00", rb"\ude00"])
def test_a_body_of_escapes_with_a_lone_surrogate_costs_linear_memory(escape: bytes) -> None:
    num = 300_000
    body = bytearray(b'{"a":"' + escape * num + rb"\\\ud83d x" + b'"}')
    tracemalloc.start()
    try:
        text = bodies.read_object(body, "", 2**25)["a"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert isinstance(text, str)
    assert text.endswith("\\\ufffd x") and text.count("\ufffd") in (1, num + 1)
    assert peak < 20 * len(body), "orjson itself takes twelve times the body"


@pytest.mark.parametrize(
    ("path", "field", "items", "problem"),
    [
        (COUNT, "messages", short_messages(limits.MOST_MESSAGES + 1), "messages > 10000"),
        (COUNT, "tools", [{"name": f"t{n}", "input_schema": {}} for n in range(1001)], "> 1000"),
        (COUNT, "metadata", [[] for _ in range(limits.MOST_VALUES)], "JSON values"),
        (
            COUNT,
            "messages",
            [{"role": "user", "content": [{}] * limits.MOST_VALUES}],
            "JSON values",
        ),
        ("/v1/messages", "messages", short_messages(300_000), "JSON values"),
        ("/v1/responses/input_tokens", "input", short_messages(300_000), "JSON values"),
    ],
    ids=["messages", "tools", "values", "parts", "many messages", "many items"],
)
async def test_each_bound_is_named_before_a_text_is_looked_at(
    open_session: OpenSession,
    engine: RecordingEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    field: str,
    items: Any,
    problem: str,
) -> None:
    monkeypatch.setattr(history, "_squeezed", None)
    body = {"model": "m", LISTS.get(path, "messages"): short_messages(1), field: items}

    status, answer = await ask(open_session(), path, body)

    assert status == 413
    assert problem in answer["error"]["message"]
    assert engine.calls == []
