"""The server against HTTP that divides servers, and against broken text in every field."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from e2b import Sandbox

from tests.http_corpus import REFUSED, SERVED, answers, replay

from .helpers import KEY, Service

CREDENTIALS = f"Host: x\r\nX-API-Key: {KEY}\r\n".encode()
FIRST = b"POST /sandboxes/none/timeout HTTP/1.1\r\n" + CREDENTIALS
HIDDEN = b"GET /health HTTP/1.1\r\n" + CREDENTIALS + b"\r\n"
PROCESS = {"process": {"pid": "9999"}}
CALLS: dict[str, dict[str, Any]] = {
    "/v2/sandboxes": {"templateID": "none", "metadata": {"a": "b"}, "envVars": {"A": "b"}},
    "/sandboxes/ID/connect": {"timeout": "60"},
    "/process.Process/Start": {"process": {"cmd": "/bin/true", "envs": {"A": "b"}}},
    "/process.Process/SendInput": {**PROCESS, "input": {"stdin": "aGk="}},
    "/process.Process/SendSignal": {**PROCESS, "signal": "SIGNAL_SIGTERM"},
    "/filesystem.Filesystem/ListDir": {"path": "/tmp/a", "depth": "1"},
    "/filesystem.Filesystem/Move": {"source": "/tmp/a", "destination": "/tmp/b"},
}


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
async def test_a_request_is_read_in_one_way_only(service: Service, name: str) -> None:
    port = int(service.url.rpartition(":")[2])
    sent = REFUSED.get(name) or SERVED[name]
    answer = await replay("127.0.0.1", port, sent, first=FIRST, hidden=HIDDEN)

    assert answers(answer) == ([200] * 3 if name in SERVED else [400]), answer
    assert b"Traceback" not in answer and KEY.encode() not in answer


def with_broken_texts(value: Any, broken: bytes) -> Iterator[bytes]:
    """Yield the body once for each text in it, with broken text behind that text."""
    packed = orjson.dumps(value)
    for at, char in enumerate(packed):
        if char == ord('"') and packed[at + 1 : at + 2] in (b",", b"]", b"}"):
            yield packed[:at] + broken + packed[at:]


@pytest.mark.parametrize("broken", [b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\0", b"\\u0000"])
def test_broken_text_in_any_field_is_answered_or_refused(
    service: Service, sandbox: Sandbox, broken: bytes
) -> None:
    headers = {"X-API-Key": KEY, "E2b-Sandbox-Id": sandbox.sandbox_id}
    headers |= {"X-Access-Token": sandbox._envd_access_token or "", "Connect-Timeout-Ms": "2000"}
    with service.client(**headers) as client:
        for path, message in CALLS.items():
            is_stream = path.endswith("/Start")
            kind = "application/connect+json" if is_stream else "application/json"
            for body in with_broken_texts(message, broken):
                framed = struct.pack(">BI", 0, len(body)) + body if is_stream else body
                target = path.replace("ID", sandbox.sandbox_id)
                answer = client.post(target, content=framed, headers={"Content-Type": kind})
                assert answer.status_code < 500, (path, body, answer.text)
        assert client.get("/health").status_code == 204


def test_a_body_that_grows_is_refused_before_it_is_whole(service: Service) -> None:
    def resident_mib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) >> 8

    bomb, before_mib = gzip.compress(bytes(100 << 20), 1), resident_mib()
    headers = {"X-API-Key": KEY, "Content-Encoding": "gzip"}
    with service.client(**headers) as client:
        for _ in range(3):
            with suppress(httpx.TransportError):  # it is closed before the client has sent all
                assert client.post("/v2/sandboxes", content=bomb).status_code in (400, 413)
    assert resident_mib() - before_mib < 32
