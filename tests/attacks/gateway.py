"""Attacks on services of this machine: gateway, engine, other sessions, daemons."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from swerl.core import plugins
from swerl.core.chat import Finish, Message, Role
from swerl.core.contracts import Family
from swerl.core.learning import WeightRef
from swerl.core.turn import Completion, Sampling
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.gateway.sessions import Session
from tests.attacks._targets import WordServer, greeter, new_word
from tests.attacks.attack import (
    AttackContext,
    AttackFinding,
    CannotError,
    attack,
    judge,
    refused,
    worked,
)

_ADMIN = (
    "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed",
    "/init_weights_update_group", "/get_weights_by_name", "/flush_cache", "/abort_request",
    "/pause_generation", "/continue_generation", "/generate", "/get_server_info", "/server_info",
    "/get_model_info", "/model_info", "/get_load", "/get_internal_state", "/set_internal_state",
    "/release_memory_occupation", "/resume_memory_occupation", "/start_profile", "/stop_profile",
    "/configure_logging", "/load_lora_adapter", "/unload_lora_adapter", "/open_session",
    "/health_generate", "/metrics", "/docs", "/openapi.json", "/v1/load_lora_adapter",
    "//flush_cache", "/v1/../flush_cache", "/v1/messages/..%2f..%2fflush_cache", "/./flush_cache",
)  # fmt: skip
_NEARBY = 40
_CHAT = b'{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"hello"}]}'
_SAMPLING = Sampling(max_new_tokens=64)


@attack("Connects to ports on the host's loopback, by TCP and UDP.")
async def host_loopback(ctx: AttackContext) -> AttackFinding:
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        for sock in (tcp, udp):
            sock.bind(("127.0.0.1", 0))
        port, udp_port = tcp.getsockname()[1], udp.getsockname()[1]
        async with greeter(tcp) as served:
            names = ("127.0.0.1", "127.0.0.2", "0.0.0.0")
            outcomes = await ctx.box.attack("network.connect", [(name, port) for name in names])
            await ctx.box.attack("network.send_datagram", "127.0.0.1", udp_port, served.word)
            udp.setblocking(False)
            try:
                outcomes["a datagram"] = f"ok: {len(udp.recv(100))} bytes arrived"
            except BlockingIOError:
                outcomes["a datagram"] = "no datagram arrived"
    holes = [hole for hole in worked(outcomes) if served.word in hole or "datagram" in hole]
    if served.num_calls and not holes:
        holes.append("the host's port was reached")
    return judge(holes, refused(outcomes))


@attack("Connects to an abstract Unix socket of the host.")
async def abstract_sockets(ctx: AttackContext) -> AttackFinding:
    with socket.socket(socket.AF_UNIX) as sock:
        name = new_word()
        sock.bind(f"\0{name}")
        async with greeter(sock):
            outcomes = await ctx.box.attack("network.connect_abstract", name)
    return judge(worked(outcomes), refused(outcomes))


@attack("Connects to every visible socket file: container engines, message buses, agents.")
async def daemon_sockets(ctx: AttackContext) -> AttackFinding:
    with socket.socket(socket.AF_UNIX) as sock, tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/daemon.sock"
        sock.bind(path)
        async with greeter(sock):
            outcomes = await ctx.box.attack("network.connect_files", [path], timeout_s=12)
    return judge(worked(outcomes), f"{len(outcomes)} sockets tried, none answered")


@attack("Connects to another sandbox's endpoint by guessing its port.")
async def other_sessions(ctx: AttackContext) -> AttackFinding:
    mine, theirs = WordServer(new_word()), WordServer(new_word())
    try:
        async with ctx.open() as other:
            own_port = _port(await ctx.box.sandbox.expose(mine))
            other_port = _port(await other.sandbox.expose(theirs))
            listening = await ctx.box.attack("network.listeners")
            near = range(own_port - _NEARBY, own_port + _NEARBY)
            ports = sorted({own_port, other_port, *near, *map(int, listening)})
            greetings = await ctx.box.attack("network.greetings", ports)
    finally:
        mine.close()
        theirs.close()
    holes = [
        f"port {port} is the other's" for port, text in greetings.items() if theirs.word in text
    ]
    if theirs.num_calls and not holes:
        holes.append("the other's endpoint was reached")
    if not holes and mine.word not in greetings[str(own_port)]:
        raise CannotError(f"the sandbox's own endpoint does not answer: {greetings[str(own_port)]}")
    return judge(holes, f"{len(ports)} ports tried; only its own answers as a gateway")


@attack("Requests another session from the gateway, with guessed keys and with its real key.")
async def session_keys(ctx: AttackContext) -> AttackFinding:
    async with _served(ctx) as (engine, session, gateway, port):
        other = _open(gateway, "other")
        keys = {"no key": "", "a guess": "sk-swerl-guess", "the other's key": other.key}
        await ctx.box.attack(
            "network.ask", port, {name: _post("/v1/messages", key) for name, key in keys.items()}
        )
        reached = [call for call in engine.calls if call != f"generate {session.id}"]
        num_own = engine.calls.count(f"generate {session.id}")
        tree = await other.close()
    holes = [f"the other session was reached: {call}" for call in reached]
    if tree.turns:
        holes.append("the other session has a turn that it did not request")
    if not holes and not num_own:
        raise CannotError("the sandbox's own endpoint does not answer")
    return judge(holes, f"{num_own} requests, all answered for its own session")


@attack("Requests engine administration from the gateway: loading weights, aborting, metrics.")
async def engine_admin(ctx: AttackContext) -> AttackFinding:
    async with _served(ctx) as (engine, _, _, port):
        requests = {
            f"{method} {path}": _request(method, path)
            for path in _ADMIN
            for method in ("GET", "POST")
        }
        answers = await ctx.box.attack("network.ask", port, requests)
        holes = [f"the engine was reached: {call}" for call in engine.calls]
    answered = {name: text for name, text in answers.items() if text.startswith("HTTP/")}
    holes += [
        f"{name} returns {_status(text)}" for name, text in answered.items() if not _is_404(text)
    ]
    if not holes and len(answered) < len(requests):
        raise CannotError(
            f"{len(requests) - len(answered)} of {len(requests)} requests got no answer"
        )
    return judge(holes, f"{len(requests)} requests, all answered with a vendor's 404 error")


@attack("Uses the gateway as a proxy to fetch from the host's loopback.")
async def gateway_as_proxy(ctx: AttackContext) -> AttackFinding:
    async with _served(ctx) as (_, _, _, port):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            prize = sock.getsockname()[1]
            async with greeter(sock) as served:
                requests = {
                    "an absolute address": _request("GET", f"http://127.0.0.1:{prize}/"),
                    "a tunnel": _request("CONNECT", f"127.0.0.1:{prize}"),
                    "a forged host": _request("GET", "/", host=f"127.0.0.1:{prize}"),
                }
                answers = await ctx.box.attack("network.ask", port, requests)
                holes = [name for name, text in answers.items() if served.word in text]
                if served.num_calls and not holes:
                    holes.append("the gateway connected to the host's loopback")
    if not holes and not any(text.startswith("HTTP/") for text in answers.values()):
        raise CannotError("the sandbox's own endpoint does not answer")
    return judge(holes, ", ".join(_status(text) for text in answers.values()))


@dataclass
class _RecordingEngine:
    """Engine that generates one fixed reply and records every call. Implements Engine."""

    family: Family
    calls: list[str] = field(default_factory=list)

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        self.calls.append(f"generate {session}")
        ids_out = tuple(self.family.encode_reply(Message(Role.ASSISTANT, "Done.")))
        return Completion(ids_out, (0.0,) * len(ids_out), Finish.STOP, "probe", len(ids))

    async def abort(self, session: str) -> None:
        self.calls.append(f"abort {session}")

    async def pause(self) -> None:
        self.calls.append("pause")

    async def load(self, weights: WeightRef) -> str:
        self.calls.append(f"load {weights.version}")
        return weights.version

    async def resume(self) -> None:
        self.calls.append("resume")

    async def close(self) -> None:
        self.calls.append("close")


@asynccontextmanager
async def _served(
    ctx: AttackContext,
) -> AsyncIterator[tuple[_RecordingEngine, Session, Gateway, int]]:
    """Open a gateway with a session, exposed at a port of the sandbox's loopback."""
    family: Family = plugins.load("families", "tiny").build(None)
    engine = _RecordingEngine(family)
    async with Gateway(engine=engine, family=family) as gateway:
        session = _open(gateway, "own")
        port = _port(await ctx.box.sandbox.expose(session))
        yield engine, session, gateway, port


def _open(gateway: Gateway, name: str) -> Session:
    return gateway.open(
        f"{name}-{secrets.token_hex(4)}", sampling=_SAMPLING, limits=SessionLimits()
    )


def _port(url: str) -> int:
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost") or not parts.port:
        raise CannotError(f"the endpoint {url} is not on the sandbox's loopback")
    return parts.port


def _request(method: str, path: str, *, host: str = "gateway") -> bytes:
    body = b"{}" if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _post(path: str, key: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
    if key:
        head += f"x-api-key: {key}\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(_CHAT)}\r\n\r\n"
    return head.encode() + _CHAT


def _status(answer: str) -> str:
    words = answer.split(" ", 2)
    return words[1] if answer.startswith("HTTP/") and len(words) > 1 else answer[:60] or "nothing"


def _is_404(answer: str) -> bool:
    return _status(answer) == "404" and '"error"' in answer
