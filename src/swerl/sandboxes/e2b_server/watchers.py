"""Watching a sandbox's folders: a shell loop inside looks again and again and tells of changes.

What is made and removed between two looks is not seen.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from swerl.core.chat import Json
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Chunk
from swerl.sandboxes.e2b_server.entries import Entry, Marker, new_marker
from swerl.sandboxes.e2b_server.failure import Code, Failure
from swerl.sandboxes.e2b_server.waiting import wait_ready

_LOOK_EVERY_S = {False: "0.1", True: "0.3"}
"""Pause between looks at a folder alone, and at all below it, which costs more."""
_MAX_EVENTS = 10_000
_MAX_WATCHERS = 64
_LOOP = """\
old=none
while [ -d "$1" ]; do
    new=$(find "${1%/}/" -mindepth 1 $DEPTH -exec stat -c "$MARK_ENTRY" -- {} + 2>/dev/null)
    [ "$new" = "$old" ] || printf '%s\\n%s end\\n' "$new" "$MARK"
    old=$new
    sleep "$EVERY"
done
"""


@dataclass(frozen=True, slots=True)
class Change:
    """One event in a folder that is watched."""

    name: str
    """Path below the folder."""
    kind: str

    def message(self) -> dict[str, Json]:
        """Return it as the SDK reads it."""
        return {"name": self.name, "type": f"EVENT_TYPE_{self.kind}"}


class Watchers:
    """The watchers of one sandbox whose events wait to be fetched."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._waiting: dict[str, list[Change]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def make(self, path: str, *, recursive: bool) -> str:
        """Begin to watch a folder and return the watcher's id."""
        if len(self._tasks) >= _MAX_WATCHERS:
            raise Failure(Code.RESOURCE_EXHAUSTED, f"{_MAX_WATCHERS} watchers are open already")
        name = f"w{secrets.token_hex(10)}"
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._watch(name, path, recursive, ready))
        await wait_ready(task, ready)
        self._tasks[name] = task
        return name

    def fetch(self, name: str) -> list[Change]:
        """Return what has happened since the last time."""
        if name not in self._waiting:
            raise Failure(Code.NOT_FOUND, f"watcher with id {name[:64]} not found")
        waiting, self._waiting[name] = self._waiting[name], []
        return waiting

    async def remove(self, name: str) -> None:
        """Stop watching."""
        if name not in self._waiting:
            raise Failure(Code.NOT_FOUND, f"watcher with id {name[:64]} not found")
        del self._waiting[name]
        await _end([self._tasks.pop(name)])

    async def close(self) -> None:
        """Stop all."""
        self._waiting.clear()
        await _end(list(self._tasks.values()))
        self._tasks.clear()

    async def _watch(
        self, name: str, path: str, recursive: bool, ready: asyncio.Future[None]
    ) -> None:
        self._waiting[name] = []
        try:
            async with aclosing(changes_in(self._sandbox, path, recursive=recursive)) as looks:
                async for changes in looks:
                    if not ready.done():
                        ready.set_result(None)
                    waiting = self._waiting[name]
                    waiting.extend(changes)
                    del waiting[:-_MAX_EVENTS]
        except SandboxError:
            if not ready.done():
                raise
        finally:
            if not ready.done():
                self._waiting.pop(name, None)


async def changes_in(
    sandbox: Sandbox, path: str, *, recursive: bool
) -> AsyncGenerator[Sequence[Change], None]:
    """Yield nothing once the folder is being watched, then what changes, look by look."""
    marker = new_marker()
    env = {
        "MARK": marker.word, "MARK_ENTRY": marker.entry, "EVERY": _LOOK_EVERY_S[recursive],
        "DEPTH": "" if recursive else "-maxdepth 1", "LC_ALL": "C", "TZ": "UTC",
    }  # fmt: skip
    seen: Mapping[str, Entry] | None = None
    async with sandbox.start(["sh", "-c", _LOOP, "sh", path], cwd="/", env=env, user="root") as it:
        async for look in _looks(it.output(), marker):
            yield [] if seen is None else _compare(seen, look, path)
            seen = look
    if seen is None:
        raise Failure(Code.INTERNAL, f"cannot watch {path}")


async def _looks(
    chunks: AsyncIterator[Chunk], marker: Marker
) -> AsyncIterator[Mapping[str, Entry]]:
    """Yield what each look finds: path -> entry."""
    end, data = f"{marker.word} end\n".encode(), b""
    async for chunk in chunks:
        data += b"" if chunk.is_stderr else chunk.data
        while end in data:
            look, _, data = data.partition(end)
            yield {entry.path: entry for entry in marker.read(look.decode(errors="replace"))}


def _compare(old: Mapping[str, Entry], new: Mapping[str, Entry], folder: str) -> list[Change]:
    """Return what happened between two looks, as inotify would tell it."""
    base = len(folder.rstrip("/")) + 1
    moved = {new[path].inode for path in new.keys() - old.keys()}
    changes = [
        Change(path[base:], "RENAME" if entry.inode in moved else "REMOVE")
        for path, entry in old.items()
        if path not in new
    ]
    inodes = {entry.inode for entry in old.values()}
    for path, entry in new.items():
        before, name = old.get(path), path[base:]
        if before is None:
            changes.append(Change(name, "CREATE"))
            if entry.size and not entry.is_folder and entry.inode not in inodes:
                changes.append(Change(name, "WRITE"))
            continue
        if before.mode != entry.mode:
            changes.append(Change(name, "CHMOD"))
        if not entry.is_folder and (before.changed, before.size) != (entry.changed, entry.size):
            changes.append(Change(name, "WRITE"))
    return changes


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
