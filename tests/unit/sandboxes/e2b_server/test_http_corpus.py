"""The sandbox server against HTTP that divides servers, and against broken text in every field."""

from __future__ import annotations

import gzip
import json
import logging
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import orjson
import pytest
from e2b import Sandbox

from tests.http_corpus import (
    CHUNKED,
    CHUNKS,
    NUM_PIPELINED,
    REFUSED,
    SERVED,
    UPGRADES,
    answers,
    converse,
    offer,
    replay,
)
from tests.unit.gateway.test_fuzz import NUM_REQUESTS, mutated, resident_mib, wire

from .helpers import KEY, Service

CREDENTIALS = f"Host: x\r\nX-API-Key: {KEY}\r\n".encode()
FIRST = b"POST /sandboxes/none/timeout HTTP/1.1\r\n" + CREDENTIALS
HIDDEN = b"GET /health HTTP/1.1\r\n" + CREDENTIALS + b"\r\n"
BROKEN = (b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\udc00\\ud800", b"\0", b"\\u0000")
REST: dict[str, dict[str, Any]] = {
    "/v2/sandboxes": {
        "templateID": "base",
        "metadata": {"a": "b"},
        "envVars": {"A": "b"},
        "timeout": "60",
    },
    "/sandboxes/ID/timeout": {"timeout": "60"},
    "/sandboxes/ID/connect": {"timeout": "60"},
    "/sandboxes/ID/snapshots": {"name": "n"},
}
PATH = {"path": "/tmp/a"}
COMMAND = {"cmd": "/bin/true", "args": ["a"], "envs": {"A": "b"}, "cwd": "/tmp"}
PROCESS = {"process": {"tag": "t"}}
CALLS: dict[str, dict[str, Any]] = {
    "/process.Process/Start": {"process": COMMAND, "tag": "t"},
    "/process.Process/Connect": PROCESS,
    "/process.Process/SendInput": {**PROCESS, "input": {"stdin": "aGk="}},
    "/process.Process/SendSignal": {**PROCESS, "signal": "SIGNAL_SIGTERM"},
    "/process.Process/Update": {**PROCESS, "pty": {"size": {"cols": "80", "rows": "24"}}},
    "/filesystem.Filesystem/Stat": PATH,
    "/filesystem.Filesystem/MakeDir": PATH,
    "/filesystem.Filesystem/ListDir": {**PATH, "depth": "1"},
    "/filesystem.Filesystem/Remove": PATH,
    "/filesystem.Filesystem/Move": {"source": "/tmp/a", "destination": "/tmp/b"},
    "/filesystem.Filesystem/CreateWatcher": PATH,
    "/filesystem.Filesystem/WatchDir": PATH,
    "/filesystem.Filesystem/GetWatcherEvents": {"watcherId": "w"},
}
STREAMS = ("Start", "Connect", "WatchDir")


def port_of(service: Service) -> int:
    return int(service.url.rpartition(":")[2])


@pytest.mark.parametrize("name", [*REFUSED, *SERVED])
async def test_a_request_is_read_in_one_way_only(service: Service, name: str) -> None:
    sent = REFUSED.get(name) or SERVED[name]
    answer = await replay("127.0.0.1", port_of(service), sent, first=FIRST, hidden=HIDDEN)

    assert answers(answer) == ([200] * 3 if name in SERVED else [400]), answer
    assert b"Traceback" not in answer and KEY.encode() not in answer


@pytest.mark.parametrize("name", CHUNKS)
async def test_a_chunked_body_is_its_data_alone(service: Service, name: str) -> None:
    first = b"POST /v2/sandboxes HTTP/1.1\r\n" + CREDENTIALS
    sent = b"<FIRST>" + CHUNKED + b"\r\n" + CHUNKS[name]
    answer = await replay("127.0.0.1", port_of(service), sent, first=first, hidden=HIDDEN)

    assert answers(answer) == [400, 200]
    assert b"names no template" in answer


async def test_many_pipelined_requests_are_each_answered(service: Service) -> None:
    sent = b"<HIDDEN>" * NUM_PIPELINED
    answer = await replay("127.0.0.1", port_of(service), sent, first=b"", hidden=HIDDEN)

    assert answers(answer) == [200] * (NUM_PIPELINED + 1)


@pytest.mark.parametrize("protocol", UPGRADES)
async def test_no_offer_to_change_the_protocol_is_accepted(service: Service, protocol: str) -> None:
    asked = b"POST /v2/sandboxes HTTP/1.1\r\n" + CREDENTIALS + b"Content-Length: 2\r\n\r\n{}"
    requests = offer(asked, protocol), offer(HIDDEN, protocol), HIDDEN
    answer = await converse("127.0.0.1", port_of(service), *requests)

    assert answers(answer) == [400, 200, 200]


def with_broken_texts(value: Any, broken: bytes) -> Iterator[bytes]:
    """Yield the body once for each text in it, with broken text behind that: values, and names in
    inner objects."""
    packed, depth = orjson.dumps(value), 0
    for at, char in enumerate(packed):
        depth += (char == ord("{")) - (char == ord("}"))
        ends = char == ord('"') and packed[at + 1 : at + 2]
        if ends and ends in (b":,]}" if depth > 1 else b",]}"):
            yield packed[:at] + broken + packed[at:]


def check(answer: httpx.Response) -> None:
    """An answer is a result or the client's mistake, in JSON that can be read."""
    assert answer.status_code < 500 or answer.status_code == 501, answer.text
    assert not answer.content.startswith(b"{") or answer.json() is not None
    assert "Traceback" not in answer.text and KEY not in answer.text


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_text_in_any_field_is_an_answer_or_a_refusal(
    service: Service, sandbox: Sandbox, broken: bytes
) -> None:
    num_sent = 0
    with service.client(**{"X-API-Key": KEY}) as client:
        before = len(client.get("/sandboxes").json())
        for path, message in REST.items():
            for body in with_broken_texts(message, broken):
                answer = client.post(path.replace("ID", sandbox.sandbox_id), content=body)
                check(answer)
                if answer.status_code == 201 and "sandboxID" in answer.json():
                    client.delete(f"/sandboxes/{answer.json()['sandboxID']}")
                num_sent += 1
        assert len(client.get("/sandboxes").json()) == before
    token = sandbox._envd_access_token or ""
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": token}
    headers["Connect-Timeout-Ms"] = "2000"
    with service.client(**headers) as client:
        for path, message in CALLS.items():
            streams = path.endswith(STREAMS)
            kind = "application/connect+json" if streams else "application/json"
            for body in with_broken_texts(message, broken):
                framed = struct.pack(">BI", 0, len(body)) + body if streams else body
                check(client.post(path, content=framed, headers={"Content-Type": kind}))
                num_sent += 1
        assert client.get("/health").status_code == 204
    assert num_sent > 40


OWN = b"Host: x\r\nE2b-Sandbox-Id: ID\r\nX-Access-Token: TOKEN\r\n"
ADDRESSES = [
    (b"GET /v2/sandboxes?state=@", CREDENTIALS),
    (b"GET /v2/sandboxes?metadata=@&nextToken=@", CREDENTIALS),
    (b"GET /sandboxes/@", CREDENTIALS),
    (b"GET /templates/@", CREDENTIALS),
    (b"DELETE /templates/@", CREDENTIALS),
    (b"GET /templates/aliases/@", CREDENTIALS),
    (b"GET /files?path=/tmp/@", OWN),
    (b"GET /files?path=/tmp/a&username=@", OWN),
    (b"GET /files?path=/tmp/a&signature=@&signature_expiration=@", b"Host: x\r\n"),
    (b"POST /process.Process/@", OWN),
]
"""First lines and headers of requests; `@` stands for broken text."""
HEADERS = [
    *((b"POST /v2/sandboxes", b"%b: @\r\n" % name + CREDENTIALS)
      for name in (b"Content-Type", b"Content-Encoding", b"Idempotency-Key", b"Authorization")),
    *((b"GET /files?path=/tmp/a", b"Host: x\r\n%b: @\r\n" % name)
      for name in (b"E2b-Sandbox-Id", b"E2b-Sandbox-Port", b"X-Access-Token")),
    *((b"POST /process.Process/List", b"%b: @\r\n" % name + OWN)
      for name in (b"Authorization", b"Connect-Timeout-Ms", b"Keepalive-Ping-Interval")),
    (b"GET /sandboxes", b"Host: x\r\nX-API-Key: @\r\n"),
    (b"GET /sandboxes", b"Host: @\r\nX-API-Key: a\r\n"),
]  # fmt: skip


@pytest.mark.parametrize("broken", [b"%ff", b"%ed%a0%80", b"%00", b"\xff", b"\xed\xa0\x80"])
async def test_broken_text_in_an_address_or_a_header_is_refused(
    service: Service, sandbox: Sandbox, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swerl.audit")
    token = (sandbox._envd_access_token or "").encode()
    for line, fields in [*ADDRESSES, *(HEADERS if broken[:1] != b"%" else ())]:
        head = line + b" HTTP/1.1\r\n" + fields + b"Content-Length: 0\r\n\r\n"
        own = head.replace(b"ID", sandbox.sandbox_id.encode()).replace(b"TOKEN", token)
        sent = own.replace(b"@", b"a" + broken)
        answer = await replay("127.0.0.1", port_of(service), sent, first=b"", hidden=HIDDEN)
        status = answers(answer)[0]
        assert status < 500 or status in (501, 502), (line, fields, answer)
        body = answer.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1")[0]
        assert not body.startswith(b"{") or json.loads(body), (line, fields, answer)
    assert caplog.records
    for record in caplog.records:
        assert record.getMessage().isascii()


def test_mutated_requests_are_answered_or_refused_and_nothing_grows(
    service: Service, sandbox: Sandbox
) -> None:
    random, statuses, sizes = Random(0), Counter[int](), list[float]()
    token = sandbox._envd_access_token or ""
    own = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": token}
    own["Connect-Timeout-Ms"] = "1000"
    unending = ("/sandboxes/ID/timeout", "/process.Process/Start")  # they end it, or fill it
    bodies = {path: body for path, body in {**REST, **CALLS}.items() if path not in unending}
    with service.client() as client:
        for number in range(NUM_REQUESTS // 10):
            path = random.choice([*bodies])
            body, extra = wire(mutated(bodies[path], random, random.choice([0, 0.1, 0.4])), random)
            streams = path.endswith(STREAMS)
            framed = struct.pack(">BI", 0, len(body)) + body if streams else body
            headers = {"X-API-Key": KEY} if path in REST else own
            headers = {
                **headers,
                **extra,
                "Content-Type": f"application/{'connect+' * streams}json",
            }
            target = path.replace("ID", sandbox.sandbox_id)
            try:
                answer = client.post(target, content=framed, headers=headers)
            except httpx.TransportError:  # refused and closed before the client has sent all
                statuses[0] += 1
                continue
            check(answer)
            statuses[answer.status_code] += 1
            if answer.status_code == 201 and "sandboxID" in answer.json():
                other = f"/sandboxes/{answer.json()['sandboxID']}"
                assert client.delete(other, headers={"X-API-Key": KEY}).status_code == 204
            if number % 20 == 0:
                sizes.append(resident_mib())
        assert client.get("/health", headers=own).status_code == 204
    assert statuses[400] > 0.1 * statuses.total() < 10 * statuses[200]
    assert statuses[0] < 0.1 * statuses.total(), statuses
    assert sizes[-1] - sizes[len(sizes) // 3] < 24.0, sizes


def test_a_body_that_grows_is_refused_before_it_is_whole(service: Service) -> None:
    bomb, before_mib = gzip.compress(bytes(100 << 20), 1), resident_mib()
    headers = {"X-API-Key": KEY, "Content-Encoding": "gzip"}
    with service.client(**headers) as client:
        for _ in range(3):
            with suppress(httpx.TransportError):  # it is closed before the client has sent all
                assert client.post("/v2/sandboxes", content=bomb).status_code in (400, 413)
    assert resident_mib() - before_mib < 32
