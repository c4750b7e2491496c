"""Attacks of a sandboxed agent: other paths, other settings, broken HTTP, floods."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import aiohttp
import orjson
import pytest
import zstandard

from swerl.core.errors import GatewayError
from swerl.core.turn import Sampling
from swerl.gateway import bodies, limits
from swerl.gateway.limits import SessionAdmission, SessionLimits
from swerl.gateway.router import Server
from swerl.gateway.sessions import Session
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import OpenSession

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "messages": HI},
    "/v1/chat/completions": {"model": "m", "messages": HI},
    "/v1/responses": {"model": "m", "input": "hi"},
}
# Wishes that would be answered wrongly are refused: tests/unit/gateway/dialects/test_unserved.py
WISHES: dict[str, Any] = {
    "temperature": 0,
    "top_p": 0.1,
    "top_k": 1,
    "min_p": 0.9,
    "seed": 7,
    "best_of": 4,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "stop_token_ids": [5],
    "logit_bias": {"5": 100},
    "frequency_penalty": 2,
    "presence_penalty": 2,
    "repetition_penalty": 2,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "extra_body": {"temperature": 0},
    "sampling_params": {"temperature": 0},
    "min_tokens": 900,
    "ignore_eos": True,
    "lora_path": "/etc/passwd",
    "rid": "other",
}
SMALL = orjson.dumps(BODIES["/v1/messages"])


def http(
    session: Session,
    target: str = "/v1/messages",
    *,
    method: str = "POST",
    version: str = "1.1",
    extra: str = "",
    body: bytes = SMALL,
) -> bytes:
    """Return a raw HTTP request."""
    head = (
        f"{method} {target} HTTP/{version}\r\nHost: x\r\nx-api-key: {session.key}\r\n"
        f"{extra}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def told(session: Session, *parts: bytes, until: bytes = b"}") -> bytes:
    """Send raw bytes and return the answer, up to `until` or the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", _port(session.url))
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        while not answer.endswith(until) and (more := await reader.read(65536)):
            answer += more
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


@pytest.mark.parametrize("path", BODIES)
async def test_no_setting_of_the_client_reaches_the_sampler(
    engine: RecordingEngine, open_session: OpenSession, path: str
) -> None:
    chosen = Sampling(50, temperature=0.7)
    session = open_session(sampling=chosen)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as http:
        for wishes in ({}, WISHES):
            body = BODIES[path] | wishes
            async with http.post(session.url + path, json=body) as response:
                assert response.status == 200

    plain, wished = engine.calls
    assert wished.sampling == plain.sampling
    assert wished.prompt == plain.prompt
    assert wished.sampling.temperature == 0.7


@pytest.mark.parametrize(
    "path",
    [
        "/generate", "/flush_cache", "/update_weights_from_disk", "/release_memory_occupation",
        "/abort_request", "/get_server_info", "/metrics", "/v1/completions", "/v1/load_lora",
        "/v1/messages/batches", "/v1/files", "/v1/responses/resp_1", "/v1/models/../../generate",
        "//v1/messages", "/v1/messages/../../generate", "/v1%2fmessages/generate",
        "/%2e%2e/generate",
        "http://127.0.0.1:30000/generate", "http://169.254.169.254/latest/meta-data", "*",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_no_other_path_leads_anywhere(
    engine: RecordingEngine, open_session: OpenSession, method: str, path: str
) -> None:
    session = open_session()
    answer = await told(session, http(session, path, method=method))

    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.0 400 ")), answer
    error = orjson.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] in ("not_found_error", "invalid_request_error")
    assert engine.calls == []


@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_http_1_0_is_served_to_its_end(open_session: OpenSession, stream: bytes) -> None:
    session = open_session()
    body = SMALL[:-1] + b',"stream":' + stream + b"}"

    answer = await told(session, http(session, version="1.0", body=body), until=b"never")

    assert answer.startswith(b"HTTP/1.0 200 ")
    assert b"Transfer-Encoding" not in answer
    assert answer.endswith(b'"message_stop"}\n\n' if stream == b"true" else b"}")


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(SMALL, mtime=0), 200),
        ("GZIP", gzip.compress(SMALL, mtime=0), 200),
        ("deflate", zlib.compress(SMALL), 200),
        ("zstd", zstandard.compress(SMALL), 200),
        ("identity", SMALL, 200),
        ("gzip", gzip.compress(SMALL, mtime=0)[:-12], 400),
        ("gzip", SMALL, 400),
        ("zstd", SMALL, 400),
        ("zstd", zstandard.compress(SMALL)[:-3], 400),
        ("br", SMALL, 400),
        ("gzip, gzip", gzip.compress(gzip.compress(SMALL, mtime=0), mtime=0), 400),
        ("gzip", gzip.compress(b" " * 10**7, mtime=0), 413),
        ("zstd", zstandard.compress(b" " * 10**7), 413),
    ],
)
async def test_a_compressed_body_is_decompressed_up_to_the_cap(
    open_session: OpenSession, encoding: str, body: bytes, status: int
) -> None:
    session = open_session(max_body_bytes=65536)

    answer = await told(
        session, http(session, extra=f"Content-Encoding: {encoding}\r\n", body=body)
    )

    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


async def test_a_body_that_never_ends_times_out(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.05)
    session = open_session()

    answer = await told(session, http(session)[:-5])

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"did not arrive within" in answer


async def _ends(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_a_server_full_of_busy_connections_takes_no_more() -> None:
    gate, asked = asyncio.Event(), asyncio.Event()

    async def wait(request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
        asked.set()
        await gate.wait()
        return aiohttp.web.Response()

    full = Server(wait, {}, most=1)
    listening = await asyncio.get_running_loop().create_server(full, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    await asked.wait()
    other, other_writer = await asyncio.open_connection("127.0.0.1", port)

    assert await _ends(other)
    gate.set()
    assert b"200 OK" in await reader.read()
    for one in (writer, other_writer):
        one.close()
    listening.close()


async def test_a_session_has_few_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MOST_REQUESTS", 2)
    admission = SessionAdmission(SessionLimits())

    refusal = pytest.raises(GatewayError, match="2 requests of this session are")
    with admission.request(), admission.request(), refusal as refused, admission.request():
        pass
    with admission.request():
        pass

    assert refused.value.retryable
