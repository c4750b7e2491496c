"""The calls of envd's two Connect services: processes, then files and folders."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

import orjson

from swerl.core.chat import Json
from swerl.core.sandbox import Chunk
from swerl.sandboxes.e2b_server.connect import (
    Message,
    RpcStream,
    get_bytes,
    get_flag,
    get_integer,
    get_object,
    get_table,
    get_text,
    get_texts,
)
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.folders import resolve
from swerl.sandboxes.e2b_server.processes import (
    CommandEnd,
    CommandSpec,
    RunningCommand,
    TerminalSize,
    with_silences,
)
from swerl.sandboxes.e2b_server.served import ServedSandbox
from swerl.sandboxes.e2b_server.watchers import changes_in

Reply: TypeAlias = "Mapping[str, Json | orjson.Fragment]"
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, "15": 15, "9": 9}
_MAX_DEPTH = 1000


@dataclass(frozen=True, slots=True)
class RpcCall:
    """One call of a service."""

    served: ServedSandbox
    user: str | None
    """`root`, or None for the sandbox's ordinary user."""
    message: Message
    timeout_s: float | None
    """Time limit of the client; None for no limit."""
    keepalive_s: float
    """Silence after which a stream sends a keep-alive."""


async def start(call: RpcCall, reply: RpcStream) -> None:
    """Start a command and stream it; at the call's timeout it is killed."""
    running = await call.served.processes.start(_spec(call))
    await _follow(running, call, reply)


async def connect(call: RpcCall, reply: RpcStream) -> None:
    """Stream a running command: the unread output, then what follows."""
    running = _selected(call, call.message)
    try:
        async with asyncio.timeout(call.timeout_s):
            await _follow(running, call, reply)
    except TimeoutError as error:
        message = "the connection to the command exceeded its timeout"
        raise WireError(Code.DEADLINE_EXCEEDED, message) from error


async def list_all(call: RpcCall) -> Message:
    return {"processes": [_info(running) for running in call.served.processes.all()]}


async def send_input(call: RpcCall) -> Message:
    await _send(_selected(call, call.message), get_object(call.message, "input"))
    return {}


async def stream_input(call: RpcCall, messages: AsyncIterator[Message]) -> Message:
    """Write a stream of messages to a command's input."""
    running: RunningCommand | None = None
    async for message in messages:
        if "start" in message:
            running = _selected(call, get_object(message, "start"))
        elif "data" in message:
            if running is None:
                raise WireError(
                    Code.INVALID_ARGUMENT, "the first message of the stream must name the process"
                )
            await _send(running, get_object(get_object(message, "data"), "input"))
    return {}


async def close_stdin(call: RpcCall) -> Message:
    await _selected(call, call.message).end_input()
    return {}


async def send_signal(call: RpcCall) -> Message:
    """Send SIGTERM or SIGKILL to a command and to all that it started."""
    running = _selected(call, call.message)
    given = str(call.message.get("signal", ""))
    if given not in _SIGNALS:
        raise WireError(Code.UNIMPLEMENTED, f"signal {given[:40]!r} is not supported")
    await running.signal(_SIGNALS[given])
    return {}


async def update(call: RpcCall) -> Message:
    """Resize a command's terminal."""
    running = _selected(call, call.message)
    if size := _size(call.message):
        await call.served.processes.resize(running, size)
    return {}


def _selected(call: RpcCall, message: Message) -> RunningCommand:
    selector = get_object(message, "process")
    pid, tag = get_integer(selector, "pid"), get_text(selector, "tag")
    return call.served.processes.find(pid=pid, tag=tag)


def _spec(call: RpcCall) -> CommandSpec:
    config = get_object(call.message, "process")
    cmd = get_text(config, "cmd")
    if not cmd:
        raise WireError(Code.INVALID_ARGUMENT, "the request names no command")
    size = _size(call.message)
    home = call.served.home(call.user)
    return CommandSpec(
        argv=[cmd, *get_texts(config, "args")],
        cwd=resolve(get_text(config, "cwd"), home),
        env=_checked(get_table(config, "envs")),
        user=call.user,
        tag=get_text(call.message, "tag"),
        takes_input=size is not None or get_flag(call.message, "stdin", True),
        size=size,
        timeout_s=call.timeout_s,
    )


def _checked(env: Mapping[str, str]) -> Mapping[str, str]:
    wrong = next((name for name in env if not name or "=" in name), None)
    if wrong is not None:
        raise WireError(Code.INVALID_ARGUMENT, f"{wrong!r} cannot name an environment variable")
    return env


def _size(message: Message) -> TerminalSize | None:
    if not isinstance(message.get("pty"), dict):
        return None
    size = get_object(get_object(message, "pty"), "size")
    columns, rows = get_integer(size, "cols", 80), get_integer(size, "rows", 24)
    if not (0 < columns < 65536 and 0 < rows < 65536):
        raise WireError(Code.INVALID_ARGUMENT, f"a terminal cannot be {columns} by {rows}")
    return TerminalSize(columns, rows)


async def _follow(running: RunningCommand, call: RpcCall, reply: RpcStream) -> None:
    with running.listen() as reader:
        await reply.send({"event": {"start": {"pid": running.pid}}})
        while True:
            try:
                async with asyncio.timeout(call.keepalive_s):
                    event = await reader.next()
            except TimeoutError:
                await reply.send({"event": {"keepalive": {}}})
                continue
            if isinstance(event, WireError):
                raise event
            await reply.send({"event": _event(event, running)})
            if isinstance(event, CommandEnd):
                return


def _event(event: Chunk | CommandEnd, running: RunningCommand) -> Json:
    if isinstance(event, CommandEnd):
        return {"end": event.message()}
    stream = "pty" if running.terminal else "stderr" if event.is_stderr else "stdout"
    return {"data": {stream: base64.b64encode(event.data).decode()}}


async def _send(running: RunningCommand, given: Message) -> None:
    if "pty" in given:
        await running.send(await get_bytes(given, "pty"), to_terminal=True)
    elif "stdin" in given:
        await running.send(await get_bytes(given, "stdin"), to_terminal=False)
    else:
        raise WireError(Code.UNIMPLEMENTED, "input must be `stdin` or `pty`")


def _info(running: RunningCommand) -> Json:
    tag: dict[str, Json] = {"tag": running.spec.tag} if running.spec.tag else {}
    return {"pid": running.pid, "config": running.spec.message(), **tag}


async def stat(call: RpcCall) -> Message:
    return {"entry": (await call.served.folders.stat(_path(call), call.user)).message()}


async def make_dir(call: RpcCall) -> Message:
    """Make a folder and its parents."""
    await call.served.folders.make(path := _path(call), call.user)
    return {"entry": (await call.served.folders.stat(path, call.user)).message()}


async def move(call: RpcCall) -> Message:
    target = _path(call, "destination")
    await call.served.folders.move(_path(call, "source"), target, call.user)
    return {"entry": (await call.served.folders.stat(target, call.user)).message()}


async def list_dir(call: RpcCall) -> Reply:
    """List a folder to the requested depth."""
    depth = min(get_integer(call.message, "depth") or 1, _MAX_DEPTH)
    return {"entries": await call.served.folders.listing(_path(call), depth, call.user)}


async def remove(call: RpcCall) -> Message:
    await call.served.folders.remove(_path(call), call.user)
    return {}


async def create_watcher(call: RpcCall) -> Message:
    """Start to watch a folder; the client fetches the events."""
    path = await _folder(call)
    recursive = get_flag(call.message, "recursive")
    return {"watcherId": await call.served.watchers.make(path, recursive=recursive)}


async def get_watcher_events(call: RpcCall) -> Message:
    """Return the events since the last call."""
    changes = call.served.watchers.fetch(get_text(call.message, "watcherId"))
    return {"events": [change.message() for change in changes]}


async def remove_watcher(call: RpcCall) -> Message:
    await call.served.watchers.remove(get_text(call.message, "watcherId"))
    return {}


async def watch_dir(call: RpcCall, reply: RpcStream) -> None:
    """Stream the events in a folder until the client leaves or the call's time is over."""
    path = await _folder(call)
    recursive = get_flag(call.message, "recursive")
    listings = changes_in(call.served.sandbox, path, recursive=recursive)
    try:
        async with asyncio.timeout(call.timeout_s), aclosing(listings) as opened:
            await anext(opened)
            await reply.send({"start": {}})
            async with aclosing(with_silences(opened, call.keepalive_s)) as beats:
                async for changes in beats:
                    for change in changes or ():
                        await reply.send({"filesystem": change.message()})
                    if changes is None:
                        await reply.send({"keepalive": {}})
    except TimeoutError as error:
        raise WireError(Code.DEADLINE_EXCEEDED, "the watch exceeded its timeout") from error


def _path(call: RpcCall, name: str = "path") -> str:
    return resolve(get_text(call.message, name), call.served.home(call.user))


async def _folder(call: RpcCall) -> str:
    """Return the requested folder. Raises WireError if there is none."""
    path = _path(call)
    entry = await call.served.folders.stat(path, call.user)
    if entry.message()["type"] != "FILE_TYPE_DIRECTORY":
        raise WireError(Code.INVALID_ARGUMENT, f"path is not a directory: {path}")
    return path
