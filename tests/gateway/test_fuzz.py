"""Whatever a client sends, it gets a vendor's error or an answer, and nothing grows."""

from __future__ import annotations

from random import Random
from typing import Any

import aiohttp
import orjson
import pytest

from swerl.gateway.app import Gateway
from swerl.gateway.limits import SessionLimits
from swerl.turn import Sampling
from tests.gateway._fakes import RecordingEngine

CALL = {"type": "tool_use", "id": "a", "name": "bash", "input": {"cmd": "ls"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}
FUNCTION = {"name": "bash", "arguments": '{"cmd": "ls"}'}
BODIES = {
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "stream": False,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "bash", "description": "Run.", "input_schema": {"properties": {}}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "ok"}, CALL]},
            {"role": "user", "content": [RESULT]},
        ],
    },
    "/v1/chat/completions": {
        "model": "m",
        "max_tokens": 9,
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": {}}}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}],
            },
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]},
        ],
    },
}
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**18, "", "a", "\x00", "🐢", "<|im_end|>", [], [[]], {},
    {"type": "x"},
)  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
async def test_mutated_requests_are_answered_or_refused(
    gateway: Gateway, engine: RecordingEngine, path: str
) -> None:
    random = Random(0)
    limits = SessionLimits(max_turns=10**6, requests_per_minute=10**6)
    session = gateway.open("s", sampling=Sampling(9), limits=limits)
    statuses: set[int] = set()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as http:
        for _ in range(400):
            body = orjson.dumps(mutated(BODIES[path], random))
            if random.random() < 0.1:
                body = body[: random.randrange(len(body))]
            async with http.post(gateway.url + path, data=body) as response:
                answer = await response.read()
            statuses.add(response.status)
            assert response.status == 200 or "message" in orjson.loads(answer)["error"], body

    assert statuses == {200, 400}
    assert session.failure is None


def mutated(value: Any, random: Random) -> Any:
    """Return a copy of the value with something strange, missing or double in it."""
    if random.random() < 0.04:
        return random.choice(STRANGE)
    if isinstance(value, dict):
        kept = {key: mutated(item, random) for key, item in value.items() if random.random() > 0.02}
        return kept | ({"extra": 1} if random.random() < 0.02 else {})
    if isinstance(value, list):
        items = [mutated(item, random) for item in value]
        return items + items[: int(random.random() < 0.05)]
    return value
