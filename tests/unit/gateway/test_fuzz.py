"""Every request gets an answer or a vendor's error, and no memory grows.

A few thousand requests run by default; `SWERL_FUZZ=100000` sets another number, `-s` shows the
memory in use on the way.
"""

from __future__ import annotations

import copy
import gc
import os
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from resource import RUSAGE_SELF, getrusage
from typing import Any

import aiohttp
import orjson
import pytest

from swerl.core.contracts import Family
from swerl.core.turn import Sampling
from swerl.engines.families import qwen3_5, tiny
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.unit.engines.families.test_templates import write_model
from tests.unit.gateway._fakes import RecordingEngine

NUM_REQUESTS = int(os.environ.get("SWERL_FUZZ", "3000"))
PER_SESSION = 500
MOST_OF_ONE = 20_000
"""Requests of the one Session without limits, whose turns are kept."""
LIMITS = SessionLimits(max_turns=10**6, requests_per_minute=10**6, max_body_bytes=2**20)
MOST_GROWTH_MIB = 24.0

USE = {"type": "tool_use", "id": "a", "name": "bash", "input": {"cmd": "ls", "n": 5}}
LOADED = {"type": "tool_reference", "tool_name": "late"}
PARTS = [{"type": "text", "text": "x"}, LOADED]
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": PARTS}
FUNCTION = {"name": "bash", "arguments": '{"cmd": "ls"}'}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}}
TOOL = {"name": "bash", "description": "Run.", "parameters": SCHEMA}
INLINE = {"name": "new", "input_schema": SCHEMA}
DEFINED = {"type": "tool_definition", "definition": INLINE}
REMOVED = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "bash"}}
GRAMMAR = {"syntax": "lark", "definition": "start: /.+/"}
CUSTOM = {"name": "patch", "description": "Patch.", "format": {"type": "grammar", **GRAMMAR}}
CUSTOM_CALL = {"id": "b", "type": "custom", "custom": {"name": "patch", "input": "*** x"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "stream": False,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [
            {"name": "bash", "description": "Run.", "input_schema": SCHEMA},
            {"name": "late", "input_schema": SCHEMA, "defer_loading": True},
        ],
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "ok"},
                    USE,
                ],
            },
            {"role": "user", "content": [RESULT, {"type": "text", "text": "go on"}]},
            {"role": "system", "content": "It is late."},
            {"role": "system", "content": [{"type": "tool_addition", "tool": DEFINED}, REMOVED]},
        ],
    },
    "/v1/chat/completions": {
        "model": "m",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": TOOL}, {"type": "custom", "custom": CUSTOM}],
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}, CUSTOM_CALL],
            },
            {"role": "tool", "tool_call_id": "b", "content": "ok"},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]},
        ],
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "store": False,
        "tools": [
            {"type": "function", **TOOL},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **TOOL}]},
            {"type": "custom", **CUSTOM},
        ],
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "message", "role": "user", "content": "hi"},
            {"type": "reasoning", "id": "r", "summary": [], "content": None},
            {"type": "function_call", "call_id": "a", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "x"},
            {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** x"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "ok"},
        ],
    },
}
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**18, 1e308, "", "a", "\x00", "\ud7ff", "🐢", "<|im_end|>",
    "@deep", "@large", "<think>", "<tool_call>\n", "a" * 5000, "assistant", "tool", "user",
    "image", [], [[]], {},
    {"type": "x"}, {"type": "image"}, [{"type": "text", "text": "\n"}], {"a": {"b": [{}]}},
)  # fmt: skip
PATHS = (*BODIES, "/v1/messages/count_tokens", "/v1/responses/input_tokens")


@pytest.fixture(params=["tiny", "template"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    if request.param == "tiny":
        return tiny.build(None)
    shared: Path = request.getfixturevalue("shared_dir")
    write_model(tmp_path, shared / "tokenizers", "qwen3_5_think", ("<|im_end|>", "<|endoftext|>"))
    return qwen3_5.build(tmp_path)


async def test_mutated_requests_are_answered_or_refused_and_nothing_grows(family: Family) -> None:
    random = Random(0)
    engine = RecordingEngine(family=family)
    statuses: Counter[int] = Counter()
    sizes: list[float] = []
    async with Gateway(engine=engine, family=family) as gateway:
        for _ in range(0, NUM_REQUESTS // 2, PER_SESSION):
            session = gateway.open("s", sampling=Sampling(9), limits=LIMITS)
            statuses += await fuzz(session, random, PER_SESSION)
            await session.close()
            engine.calls.clear()
            gc.collect()
            sizes.append(resident_mib())
            if len(sizes) % max(1, NUM_REQUESTS // PER_SESSION // 40) == 0:
                sent, peak = len(sizes) * PER_SESSION, getrusage(RUSAGE_SELF).ru_maxrss / 1024
                print(f"{sent:8} requests: {sizes[-1]:.1f} MiB, peak {peak:.1f}", flush=True)  # noqa: T201
        print(dict(sorted(statuses.items())), flush=True)  # noqa: T201

        assert gateway._sessions == {}
        assert gateway._router.sessions == {}
        assert len(gateway._router.on_break) <= 1
    assert set(statuses) <= {200, 400, 413}
    assert min(statuses[200], statuses[400]) > 0.05 * statuses.total()
    assert sizes[-1] - sizes[len(sizes) // 3] < MOST_GROWTH_MIB, sizes


async def fuzz(
    session: Session, random: Random, number: int, *, fresh: bool = False
) -> Counter[int]:
    """Send mutated requests to a session and count the statuses; `fresh`: of new, long texts."""
    statuses: Counter[int] = Counter()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as http:
        for _ in range(number):
            path = random.choice(PATHS)
            body, headers = wire(request_body(path, random), random)
            if fresh:
                new = f"{random.random()} " * random.choice([1, 10, 500])
                for word in (b"hi", b"Run.", b"ls"):
                    body = body.replace(b'"%b"' % word, b'"%b"' % new.encode())
            async with http.post(session.url + path, data=body, headers=headers) as response:
                answer = await response.read()
            statuses[response.status] += 1
            assert response.status == 200 or "message" in orjson.loads(answer)["error"], body
            assert response.status < 500, (body, answer)
    assert session.failure is None
    return statuses


def request_body(path: str, random: Random) -> Any:
    """Return a request with a strange, missing, double or moved part."""
    base = next(body for name, body in BODIES.items() if path.startswith(name[:11]))
    value = mutated(copy.deepcopy(base), random, random.choice([0.0, 0.01, 0.04, 0.2]))
    if random.random() < 0.02 and isinstance(value, dict):
        value[random.choice(list(value) or ["tools"])] = "@deep"
    return value


def mutated(value: Any, random: Random, rate: float) -> Any:
    """Return a copy of the value in which each part is changed at this rate."""
    if random.random() < rate:
        return random.choice(STRANGE)
    if isinstance(value, dict):
        items = [(k, mutated(v, random, rate)) for k, v in value.items() if random.random() >= rate]
        if random.random() < rate and len(items) > 1:
            (one, left), (two, right) = random.sample(items, 2)
            items += [(one, right), (two, left)]
        return dict(items)
    if isinstance(value, list):
        parts = [mutated(part, random, rate) for part in value]
        if parts and random.random() < rate:
            parts.insert(random.randrange(len(parts) + 1), copy.deepcopy(random.choice(parts)))
        if random.random() < rate:
            random.shuffle(parts)
        return parts
    return value


def wire(value: Any, random: Random) -> tuple[bytes, dict[str, str]]:
    """Return a body as bytes, sometimes cut, scrambled or compressed, with its headers."""
    depth = random.choice([100, 300, 900, 1500])
    body = orjson.dumps(value)
    body = body.replace(b'"@deep"', b'{"a":' * depth + b"{}" + b"}" * depth)
    body = body.replace(b'"@large"', b"1" * 400)
    if random.random() < 0.05:
        body = body[: random.randrange(len(body) + 1)]
    if random.random() < 0.05 and body:
        scrambled = bytearray(body)
        for _ in range(random.randrange(1, 4)):
            scrambled[random.randrange(len(body))] = random.randrange(256)
        body = bytes(scrambled)
    if random.random() < 0.05:
        packed = random.choice([zlib.compress(body), body])
        return packed, {"Content-Encoding": random.choice(["deflate", "gzip", "zstd", "br", "x"])}
    return body, {}


async def test_a_session_without_limits_keeps_its_turns_and_little_else() -> None:
    """One Session answers requests whose tools, arguments and texts are all new and long."""
    random, engine, sizes = Random(1), RecordingEngine(), list[float]()
    number = min(NUM_REQUESTS // 2, MOST_OF_ONE)
    free = replace(LIMITS, max_context_tokens=10**9, max_sampled_tokens=10**9)
    async with Gateway(engine=engine, family=engine.family) as gateway:
        session = gateway.open("s", sampling=Sampling(9), limits=free)
        for _ in range(10):
            await fuzz(session, random, number // 10, fresh=True)
            engine.calls.clear()
            gc.collect()
            delivered = session.conversation._delivered
            num_ids = sum(len(node.prompt_ids) + len(node.output_ids) for node in delivered)
            sizes.append(resident_mib() - num_ids * 4 / 2**20)

    assert len(delivered) > number // 25
    assert sizes[-1] - sizes[2] < MOST_GROWTH_MIB, sizes


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
