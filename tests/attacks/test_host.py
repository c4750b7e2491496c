"""Attacks on this machine and its services: files, processes, sockets, the gateway."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from swerl.core import plugins
from swerl.core.chat import Message, Role
from swerl.core.secrets import lent
from swerl.core.turn import Sampling
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway

from .box import USERS, Box, new_word, planted, victim, worked

ADMIN = (
    "/update_weights_from_disk", "/flush_cache", "/abort_request", "/generate", "/metrics",
    "/docs", "/release_memory_occupation", "/v1/load_lora_adapter", "//flush_cache",
    "/v1/../flush_cache", "/v1/messages/..%2f..%2fflush_cache", "/./flush_cache",
)  # fmt: skip
CHAT = b'{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"hello"}]}'


@pytest.mark.parametrize("user", USERS)
async def test_no_private_file_of_the_host_is_readable(box: Box, user: str | None) -> None:
    word = new_word()
    with planted(word) as paths:
        assert paths
        assert await box.attack("processes.read_through", paths, word, user=user) == {}


@pytest.mark.parametrize("user", USERS)
async def test_no_process_of_the_host_is_visible_or_killed(box: Box, user: str | None) -> None:
    word = new_word()
    async with victim(word) as process:
        assert await box.attack("processes.search", word, user=user) == {}
        await box.attack("processes.read_and_kill", process.pid, user=user)
        assert process.returncode is None
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state not in "ZX"


async def test_no_secret_of_the_controller_is_in_an_environment(box: Box) -> None:
    word = new_word()
    script = "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true"
    with lent("SWERL_PROBE_TOKEN", word):
        async with box.other() as other:
            for user in USERS:
                assert word not in (await other.sh(script, user=user)).text


async def test_no_socket_of_the_host_is_reachable(box: Box) -> None:
    with socket.create_server(("", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        word = new_word()
        abstract.bind(f"\0{word}")
        abstract.listen()
        address = socket.gethostbyname(socket.gethostname())
        targets = [(name, tcp.getsockname()[1]) for name in ("127.0.0.1", "127.0.0.2", address)]
        assert worked(await box.attack("network.connect", targets, word)) == []


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    family = plugins.family("tiny", None)
    engine = ScriptedEngine(family, lambda _: [Message(Role.ASSISTANT, "Done.")] * 8)
    async with Gateway(engine=engine, family=family) as gateway:
        yield gateway
    await engine.close()


def request(method: str, path: str, key: str = "", body: bytes = b"{}") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
    head += f"x-api-key: {key}\r\nAuthorization: Bearer {key}\r\n" if key else ""
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_the_gateway_serves_its_own_session_alone(box: Box, gateway: Gateway) -> None:
    sampling, limits = Sampling(max_new_tokens=64), SessionLimits()
    session = gateway.open("own", sampling=sampling, limits=limits)
    other = gateway.open("other", sampling=sampling, limits=limits)
    port = urlsplit(await box.sandbox.expose(session)).port
    with socket.create_server(("127.0.0.1", 0)) as prize:
        address = f"127.0.0.1:{prize.getsockname()[1]}"
        admin = {f"{way} {path}": request(way, path) for path in ADMIN for way in ("GET", "POST")}
        proxied = {
            "proxy": request("GET", f"http://{address}/"),
            "CONNECT": request("CONNECT", address),
        }
        answers = await box.attack("network.ask", port, {**admin, **proxied})
        prize.settimeout(0.2)
        with pytest.raises(TimeoutError):
            prize.accept()
    wrong = {name: text[:90] for name, text in answers.items() if text.split(" ")[1:2] != ["404"]}
    assert wrong.keys() <= proxied.keys(), wrong
    keys = {"no key": "", "a guess": "sk-swerl-guess", "the other's key": other.key}
    chats = {name: request("POST", "/v1/messages", key, CHAT) for name, key in keys.items()}
    await box.attack("network.ask", port, chats)
    assert len((await session.close()).turns) == len(keys)
    assert not (await other.close()).turns
