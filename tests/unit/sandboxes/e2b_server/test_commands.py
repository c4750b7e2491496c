"""Commands through the SDK and on the wire: exit codes, signals, envelopes, deadlines."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest
from e2b import CommandExitException, Sandbox, SandboxException

from .helpers import Service, eventually


def test_a_command_outlives_its_client_and_its_output_is_dropped(sandbox: Sandbox) -> None:
    script = "echo one; read x; yes | head -c 20000000; touch printed; sleep 60"
    handle = sandbox.commands.run(script, background=True, stdin=True)
    assert next(iter(handle))[0] == "one\n"
    handle.disconnect()
    sandbox.commands.send_stdin(handle.pid, "go\n")
    eventually(lambda: sandbox.files.exists("printed"))
    assert handle.pid in [info.pid for info in sandbox.commands.list()]
    with pytest.raises(SandboxException, match="does not serve"):
        sandbox.commands.connect(handle.pid)


def test_kill_ends_a_command_once(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 60", background=True)
    assert handle.pid in [info.pid for info in sandbox.commands.list()]
    assert handle.kill()
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert (ended.value.exit_code, ended.value.error) == (-1, "signal: killed")
    assert not sandbox.commands.kill(handle.pid)


def test_the_pid_is_the_one_inside(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 60", background=True)
    sandbox.commands.run(f"kill -TERM {handle.pid}")
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert ended.value.exit_code == 143


def test_terminals_are_not_served(sandbox: Sandbox) -> None:
    from e2b.sandbox.commands.command_handle import PtySize

    with pytest.raises(SandboxException, match="does not serve terminals"):
        sandbox.pty.create(PtySize(rows=31, cols=97))


STREAM = {"Content-Type": "application/connect+json"}


@pytest.fixture
def envd(service: Service, sandbox: Sandbox) -> Iterator[httpx.Client]:
    """A plain client of one sandbox."""
    token = sandbox._envd_access_token or ""
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": token}
    with service.client(**headers) as client:
        yield client


def pack(message: Mapping[str, object], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def unpack(body: bytes) -> list[tuple[int, Any]]:
    found = []
    while body:
        flags, length = struct.unpack(">BI", body[:5])
        found.append((flags, json.loads(body[5 : 5 + length])))
        body = body[5 + length :]
    return found


def start(script: str, **more: object) -> bytes:
    return pack({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, **more})


def test_a_deadline_ends_the_stream_with_its_code(envd: httpx.Client) -> None:
    headers = {**STREAM, "Connect-Timeout-Ms": "300"}
    answer = envd.post("/process.Process/Start", content=start("sleep 600"), headers=headers)
    flags, last = unpack(answer.content)[-1]
    assert (flags, last["error"]["code"]) == (2, "deadline_exceeded")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_argument"),
        (b"\0\0\0", "invalid_argument"),
        (pack({"process": {"cmd": "x"}})[:-2], "invalid_argument"),
        (b"\0\0\0\0\4nope", "invalid_argument"),
        (b"\0\xff\xff\xff\xff", "resource_exhausted"),
        (pack({}, flags=1), "unimplemented"),
        (pack({}), "invalid_argument"),
        (pack({"process": {"cmd": "true", "envs": {"A=B": "c"}}}), "invalid_argument"),
        (pack({"process": {"cmd": "/no/such/program"}}), "invalid_argument"),
        (pack({"process": {"cmd": "sh"}, "pty": {"size": {"cols": 9}}}), "unimplemented"),
        (pack({"process": {"cmd": "sh", "args": ["a"] * 10_001}}), "invalid_argument"),
        (b"\0\0\0\x27\x10" + b"[" * 10_000, "invalid_argument"),
    ],
)
def test_a_wrong_stream_is_refused(envd: httpx.Client, content: bytes, code: str) -> None:
    answer = envd.post("/process.Process/Start", content=content, headers=STREAM)
    error = answer.json() if answer.is_error else unpack(answer.content)[-1][1]["error"]
    assert error["code"] == code, error
