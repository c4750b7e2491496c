"""The calls of envd's process service."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping

from swerl.core.chat import Json
from swerl.core.sandbox import Chunk
from swerl.sandboxes.e2b_server import fields
from swerl.sandboxes.e2b_server.call import Call
from swerl.sandboxes.e2b_server.connect import Reply
from swerl.sandboxes.e2b_server.failure import Code, Failure
from swerl.sandboxes.e2b_server.fields import Message
from swerl.sandboxes.e2b_server.paths import resolve
from swerl.sandboxes.e2b_server.running import Ended, Running
from swerl.sandboxes.e2b_server.spec import Size, Spec

_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, "15": 15, "9": 9}


async def start(call: Call, reply: Reply) -> None:
    """Start a command and stream it; at the call's timeout it is killed."""
    running = await call.box.processes.start(_spec(call))
    await _follow(running, call, reply)


async def connect(call: Call, reply: Reply) -> None:
    """Stream a command that runs already: what nobody has heard yet, and what comes."""
    running = _selected(call, call.message)
    try:
        async with asyncio.timeout(call.timeout_s):
            await _follow(running, call, reply)
    except TimeoutError as error:
        message = "the connection to the command ran into its timeout"
        raise Failure(Code.DEADLINE_EXCEEDED, message) from error


async def list_all(call: Call) -> Message:
    """List the commands that run."""
    return {"processes": [_info(running) for running in call.box.processes.all()]}


async def send_input(call: Call) -> Message:
    """Write to a command's input."""
    await _send(_selected(call, call.message), fields.part(call.message, "input"))
    return {}


async def stream_input(call: Call, messages: AsyncIterator[Message]) -> Message:
    """Write to a command's input what a stream brings."""
    running: Running | None = None
    async for message in messages:
        if "start" in message:
            running = _selected(call, fields.part(message, "start"))
        elif "data" in message:
            if running is None:
                raise Failure(Code.INVALID_ARGUMENT, "the stream names no process first")
            await _send(running, fields.part(fields.part(message, "data"), "input"))
    return {}


async def close_stdin(call: Call) -> Message:
    """Close a command's input."""
    await _selected(call, call.message).end_input()
    return {}


async def send_signal(call: Call) -> Message:
    """Send a command, and all that it started, SIGTERM or SIGKILL."""
    running = _selected(call, call.message)
    given = str(call.message.get("signal", ""))
    if given not in _SIGNALS:
        raise Failure(Code.UNIMPLEMENTED, f"signal {given[:40]!r} is not supported")
    await running.signal(_SIGNALS[given])
    return {}


async def update(call: Call) -> Message:
    """Resize a command's terminal."""
    running = _selected(call, call.message)
    if size := _size(call.message):
        await call.box.processes.resize(running, size)
    return {}


async def _follow(running: Running, call: Call, reply: Reply) -> None:
    with running.listen() as listener:
        await reply.send({"event": {"start": {"pid": running.pid}}})
        while True:
            try:
                async with asyncio.timeout(call.keepalive_s):
                    event = await listener.next()
            except TimeoutError:
                await reply.send({"event": {"keepalive": {}}})
                continue
            if isinstance(event, Failure):
                raise event
            await reply.send({"event": _event(event, running)})
            if isinstance(event, Ended):
                return


def _event(event: Chunk | Ended, running: Running) -> Json:
    if isinstance(event, Ended):
        return {"end": event.message()}
    stream = "pty" if running.terminal else "stderr" if event.is_stderr else "stdout"
    return {"data": {stream: base64.b64encode(event.data).decode()}}


def _spec(call: Call) -> Spec:
    config = fields.part(call.message, "process")
    cmd = fields.text(config, "cmd")
    if not cmd:
        raise Failure(Code.INVALID_ARGUMENT, "the request names no command")
    size = _size(call.message)
    home = call.box.home(call.user)
    return Spec(
        argv=[cmd, *fields.texts(config, "args")],
        cwd=resolve(fields.text(config, "cwd"), home),
        env=_checked(fields.table(config, "envs")),
        user=call.user,
        tag=fields.text(call.message, "tag"),
        takes_input=size is not None or fields.flag(call.message, "stdin", True),
        size=size,
        timeout_s=call.timeout_s,
    )


def _checked(env: Mapping[str, str]) -> Mapping[str, str]:
    wrong = next((name for name in env if not name or "=" in name), None)
    if wrong is not None:
        raise Failure(Code.INVALID_ARGUMENT, f"{wrong!r} cannot name an environment variable")
    return env


def _size(message: Message) -> Size | None:
    if not isinstance(message.get("pty"), dict):
        return None
    size = fields.part(fields.part(message, "pty"), "size")
    columns, rows = fields.integer(size, "cols", 80), fields.integer(size, "rows", 24)
    if not (0 < columns < 65536 and 0 < rows < 65536):
        raise Failure(Code.INVALID_ARGUMENT, f"a terminal cannot be {columns} by {rows}")
    return Size(columns, rows)


def _selected(call: Call, message: Message) -> Running:
    selector = fields.part(message, "process")
    pid, tag = fields.integer(selector, "pid"), fields.text(selector, "tag")
    return call.box.processes.find(pid=pid, tag=tag)


async def _send(running: Running, given: Message) -> None:
    if "pty" in given:
        await running.send(fields.data(given, "pty"), to_terminal=True)
    elif "stdin" in given:
        await running.send(fields.data(given, "stdin"), to_terminal=False)
    else:
        raise Failure(Code.UNIMPLEMENTED, "input must be `stdin` or `pty`")


def _info(running: Running) -> Json:
    tag: dict[str, Json] = {"tag": running.spec.tag} if running.spec.tag else {}
    return {"pid": running.pid, "config": running.spec.message(), **tag}
