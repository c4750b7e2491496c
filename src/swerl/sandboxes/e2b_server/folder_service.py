"""The calls of envd's file system service."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from swerl.sandboxes.e2b_server import fields
from swerl.sandboxes.e2b_server.call import Call
from swerl.sandboxes.e2b_server.connect import Reply
from swerl.sandboxes.e2b_server.failure import Code, Failure
from swerl.sandboxes.e2b_server.fields import Message
from swerl.sandboxes.e2b_server.paths import resolve
from swerl.sandboxes.e2b_server.waiting import with_silences
from swerl.sandboxes.e2b_server.watchers import changes_in

_MAX_DEPTH = 1000


async def stat(call: Call) -> Message:
    """Tell about one path."""
    return {"entry": (await call.box.folders.stat(_path(call), call.user)).message()}


async def make_dir(call: Call) -> Message:
    """Make a folder and its parents."""
    await call.box.folders.make(path := _path(call), call.user)
    return {"entry": (await call.box.folders.stat(path, call.user)).message()}


async def move(call: Call) -> Message:
    """Rename a file or folder."""
    target = _path(call, "destination")
    await call.box.folders.move(_path(call, "source"), target, call.user)
    return {"entry": (await call.box.folders.stat(target, call.user)).message()}


async def list_dir(call: Call) -> Message:
    """List a folder, as deep as asked."""
    depth = min(fields.integer(call.message, "depth") or 1, _MAX_DEPTH)
    entries = await call.box.folders.entries(_path(call), depth, call.user)
    return {"entries": [entry.message() for entry in entries]}


async def remove(call: Call) -> Message:
    """Remove a file or folder."""
    await call.box.folders.remove(_path(call), call.user)
    return {}


async def create_watcher(call: Call) -> Message:
    """Begin to watch a folder, for events that are fetched."""
    path = await _folder(call)
    recursive = fields.flag(call.message, "recursive")
    return {"watcherId": await call.box.watchers.make(path, recursive=recursive)}


async def get_watcher_events(call: Call) -> Message:
    """Fetch what happened since the last time."""
    changes = call.box.watchers.fetch(fields.text(call.message, "watcherId"))
    return {"events": [change.message() for change in changes]}


async def remove_watcher(call: Call) -> Message:
    """Stop watching."""
    await call.box.watchers.remove(fields.text(call.message, "watcherId"))
    return {}


async def watch_dir(call: Call, reply: Reply) -> None:
    """Stream what happens in a folder until the client leaves or the call's time is over."""
    path = await _folder(call)
    recursive = fields.flag(call.message, "recursive")
    changes_of_looks = changes_in(call.box.sandbox, path, recursive=recursive)
    try:
        async with asyncio.timeout(call.timeout_s), aclosing(changes_of_looks) as looks:
            await anext(looks)
            await reply.send({"start": {}})
            async with aclosing(with_silences(looks, call.keepalive_s)) as beats:
                async for changes in beats:
                    for change in changes or ():
                        await reply.send({"filesystem": change.message()})
                    if changes is None:
                        await reply.send({"keepalive": {}})
    except TimeoutError as error:
        raise Failure(Code.DEADLINE_EXCEEDED, "the watch ran into its timeout") from error


def _path(call: Call, name: str = "path") -> str:
    return resolve(fields.text(call.message, name), call.box.home(call.user))


async def _folder(call: Call) -> str:
    """Return the folder that is asked for. Raises Failure where there is none."""
    path = _path(call)
    entry = await call.box.folders.stat(path, call.user)
    if entry.message()["type"] != "FILE_TYPE_DIRECTORY":
        raise Failure(Code.INVALID_ARGUMENT, f"path is not a directory: {path}")
    return path
