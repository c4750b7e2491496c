"""Attempts of processes to reach outside are recorded, and the processes behave as before."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator

import pytest

from swerl.core.sandbox import Limits
from swerl.sandboxes import local
from tests.compat.outside import far_address, question
from tests.compat.watch import WatchedSandbox

QUERY = b"\x14\xa1\x01\0\0\1\0\0\0\0\0\0\3API\7example\3com\0\0\x1c\0\1"
DIAL = """
import socket, sys
for host in sys.argv[1:]:
    try:
        socket.create_connection((host, 443), 5)
    except OSError as error:
        print(type(error).__name__)
"""


def test_a_dns_query_is_distinguished_from_other_bytes() -> None:
    assert question(QUERY) == "api.example.com"
    assert question(QUERY[:-1]) == ""
    assert question(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n\r\n") == ""
    assert question(b"\x14\xa1\x81\x80" + QUERY[4:]) == "", "an answer is no question"
    assert question(b"") == ""


@pytest.mark.parametrize(
    ("host", "expected"),
    [("1.2.3.4", "1.2.3.4:443"), ("127.0.0.1", ""), ("127.9.9.9", ""), ("0.0.0.0", "")],
)
def test_only_addresses_outside_are_noted(host: str, expected: str) -> None:
    packed = struct.pack("=H", socket.AF_INET) + struct.pack(">H", 443) + socket.inet_aton(host)
    assert far_address(packed) == expected
    raw = bytes(10) + b"\xff\xff" + socket.inet_aton(host)
    mapped = struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", 443, 0) + raw + bytes(4)
    assert far_address(mapped) == expected


def test_ipv6_is_distinguished_from_other_sockets() -> None:
    head = struct.pack("=H", socket.AF_INET6) + struct.pack(">HI", 53, 0)
    assert (
        far_address(head + socket.inet_pton(socket.AF_INET6, "2001:db8::1")) == "[2001:db8::1]:53"
    )
    assert far_address(head + socket.inet_pton(socket.AF_INET6, "::1")) == ""
    assert far_address(struct.pack("=H", socket.AF_UNIX) + b"/var/run/nscd/socket\0") == ""


@pytest.fixture
async def watched() -> AsyncIterator[WatchedSandbox]:
    backend = local.build(local.Options())
    async with backend.open("host", Limits(), workdir="/repo") as sandbox:
        watched = WatchedSandbox(sandbox)
        await watched.prepare()
        yield watched


async def test_names_and_addresses_are_seen_and_fail_as_they_would_without_a_watch(
    watched: WatchedSandbox,
) -> None:
    done = await watched.run(["python3", "-c", DIAL, "api.example.com", "1.2.3.4", "127.0.0.1"])
    assert done.stdout.decode().split() == ["gaierror", "OSError", "ConnectionRefusedError"]
    assert await watched.attempts() == ("lookup api.example.com", "connect 1.2.3.4:443")


async def test_background_processes_of_a_shell_are_seen(watched: WatchedSandbox) -> None:
    script = 'python3 -c "$0" 5.6.7.8 & wait'
    done = await watched.run(["setsid", "sh", "-c", script, DIAL])
    assert done.exit_code == 0
    assert "connect 5.6.7.8:443" in await watched.attempts()


async def test_a_command_ends_as_it_would_without_a_watch(watched: WatchedSandbox) -> None:
    echoed = await watched.run(
        ["sh", "-c", "cat; pwd; echo e >&2; exit 3"], stdin=b"in", cwd="/tmp"
    )
    assert (echoed.exit_code, echoed.stdout, echoed.stderr) == (3, b"in/tmp\n", b"e\n")
    assert (await watched.run(["sh", "-c", "kill -9 $$"])).exit_code == 137
    assert (await watched.run(["no-such-program"])).exit_code == 127
    slow = await watched.run(["sleep", "60"], timeout_s=0.5)
    assert slow.timed_out
    assert await watched.attempts() == ()
