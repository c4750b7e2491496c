"""Watch a sandbox's folders: a shell loop inside lists them again and again.

A file that is made and removed between two listings is missed.
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
from swerl.sandboxes.e2b_server.connect import off_loop
from swerl.sandboxes.e2b_server.failure import Code, WireError
from swerl.sandboxes.e2b_server.folders import FileEntry, Marker, new_marker
from swerl.sandboxes.e2b_server.processes import wait_ready

_LIST_EVERY_S = {False: "0.1", True: "0.3"}
"""Pause between listings: of one folder, and of a whole tree, which costs more."""
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
class FileChange:
    """One event in a watched folder."""

    name: str
    """Path below the folder."""
    kind: str

    def message(self) -> dict[str, Json]:
        return {"name": self.name, "type": f"EVENT_TYPE_{self.kind}"}


class Watchers:
    """The watchers of one sandbox, with the events that clients have not fetched."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._waiting: dict[str, list[FileChange]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def make(self, path: str, *, recursive: bool) -> str:
        """Start to watch a folder; return the watcher's id."""
        if len(self._tasks) >= _MAX_WATCHERS:
            raise WireError(Code.RESOURCE_EXHAUSTED, f"{_MAX_WATCHERS} watchers are open already")
        name = f"w{secrets.token_hex(10)}"
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._watch(name, path, recursive, ready))
        await wait_ready(task, ready)
        self._tasks[name] = task
        return name

    def fetch(self, name: str) -> list[FileChange]:
        """Return the events since the last call."""
        if name not in self._waiting:
            raise WireError(Code.NOT_FOUND, f"watcher with id {name[:64]} not found")
        waiting, self._waiting[name] = self._waiting[name], []
        return waiting

    async def remove(self, name: str) -> None:
        if name not in self._waiting:
            raise WireError(Code.NOT_FOUND, f"watcher with id {name[:64]} not found")
        del self._waiting[name]
        await _end([self._tasks.pop(name)])

    async def close(self) -> None:
        """Stop all watchers."""
        self._waiting.clear()
        await _end(list(self._tasks.values()))
        self._tasks.clear()

    async def _watch(
        self, name: str, path: str, recursive: bool, ready: asyncio.Future[None]
    ) -> None:
        self._waiting[name] = []
        try:
            async with aclosing(changes_in(self._sandbox, path, recursive=recursive)) as listings:
                async for changes in listings:
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
) -> AsyncGenerator[Sequence[FileChange], None]:
    """Yield an empty list once the watch has begun, then the changes of each listing."""
    marker = new_marker()
    env = {
        **marker.env, "EVERY": _LIST_EVERY_S[recursive],
        "DEPTH": "" if recursive else "-maxdepth 1", "LC_ALL": "C", "TZ": "UTC",
    }  # fmt: skip
    seen: Mapping[str, FileEntry] | None = None

    def read(listing: str) -> tuple[Mapping[str, FileEntry], list[FileChange]]:
        entries = {entry.path: entry for entry in marker.read(listing)}
        return entries, [] if seen is None else _compare(seen, entries, path)

    async with sandbox.start(["sh", "-c", _LOOP, "sh", path], cwd="/", env=env, user="root") as it:
        async for listing in _listings(it.output(), marker):
            seen, changes = await off_loop(len(listing), read, listing)
            yield changes
    if seen is None:
        raise WireError(Code.INTERNAL, f"cannot watch {path}")


async def _listings(chunks: AsyncIterator[Chunk], marker: Marker) -> AsyncIterator[str]:
    """Yield the text of each listing."""
    end, data = f"{marker.word} end\n".encode(), b""
    async for chunk in chunks:
        data += b"" if chunk.is_stderr else chunk.data
        while end in data:
            listing, _, data = data.partition(end)
            yield listing.decode(errors="replace")


def _compare(
    old: Mapping[str, FileEntry], new: Mapping[str, FileEntry], folder: str
) -> list[FileChange]:
    """Return the changes between two listings, with the events that inotify would report."""
    base = len(folder.rstrip("/")) + 1
    moved = {new[path].inode for path in new.keys() - old.keys()}
    changes = [
        FileChange(path[base:], "RENAME" if entry.inode in moved else "REMOVE")
        for path, entry in old.items()
        if path not in new
    ]
    inodes = {entry.inode for entry in old.values()}
    for path, entry in new.items():
        before, name = old.get(path), path[base:]
        if before is None:
            changes.append(FileChange(name, "CREATE"))
            if entry.size and not entry.is_folder and entry.inode not in inodes:
                changes.append(FileChange(name, "WRITE"))
            continue
        if before.mode != entry.mode:
            changes.append(FileChange(name, "CHMOD"))
        if not entry.is_folder and (before.changed, before.size) != (entry.changed, entry.size):
            changes.append(FileChange(name, "WRITE"))
    return changes


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
