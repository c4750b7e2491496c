"""The one file that a process writes about its sandboxes of one backend and run.

Nobody else writes while it lives, so it takes no lock: each line is one write to a file opened
for appending. Once in a few thousand sandboxes the ended ones are added up, so the file stays
small however long the process lives.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from swerl.sandboxes.ledger.entry import Entry, Head, Page, add_up, fold
from swerl.sandboxes.ledger.lines import (
    doubted_line,
    ended_line,
    entry_lines,
    head_line,
    intent_line,
    opened_line,
    read_page,
    sum_line,
)

_MOST_BYTES = 2**19
"""About two thousand sandboxes: adding them up takes a few milliseconds."""
_KEPT_ENDED = 100
"""Sandboxes that ended last stay in the file one by one, for `ps --all`."""


class Book:
    """Writes what happens to sandboxes. Every method raises OSError where it cannot."""

    def __init__(self, path: Path, head: Head, *, most_bytes: int = _MOST_BYTES) -> None:
        self._path = path
        self._head = head
        self._fd = -1
        self._size = 0
        self._is_torn = False
        self._least = self._most = most_bytes

    def intend(self, entry: Entry) -> None:
        """Write that a sandbox is about to be created."""
        if self._fd >= 0 and not os.fstat(self._fd).st_nlink:
            self.close()  # somebody removed the file: what goes there now would be lost
        if self._size > self._most:
            self._compact()
        line = intent_line(entry)
        self._append(line if self._fd >= 0 else self._open() + line)

    def opened(self, name: str, *, id: str) -> None:
        """Write that a sandbox is there."""
        self._append(opened_line(name, time.time(), id=id))

    def ended(self, name: str, *, why: str) -> None:
        """Write that a sandbox is gone."""
        self._append(ended_line(name, time.time(), why=why))

    def doubted(self, name: str, *, why: str) -> None:
        """Write that a sandbox should be gone, and that nobody has seen it."""
        self._append(doubted_line(name, time.time(), why=why))

    def close(self) -> None:
        """Close the file; the next intent opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size = -1, 0

    def _open(self) -> str:
        """Open the file and return what has to come first: the head of a new one."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        return "" if self._size else head_line(self._head)

    def _append(self, text: str) -> None:
        if self._fd < 0:
            return  # the intent could not be written, and its owner went on without
        data = ("\n" + text if self._is_torn else text).encode()
        self._is_torn = True
        written = os.write(self._fd, data)
        self._size += written
        if written < len(data):
            raise OSError("no space left for the ledger")
        self._is_torn = False

    def _compact(self) -> None:
        """Write the file anew with its ended sandboxes added up; keep it as it is on failure."""
        page = read_page(self._path)
        if page is None:
            return
        temporary = self._path.with_suffix(".part")
        try:
            temporary.write_text(_compacted(page), encoding="utf-8")
            temporary.chmod(0o600)
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            self._most = 2 * self._size
            return
        self.close()
        self._open()
        self._most = max(self._least, 2 * self._size)


def _compacted(page: Page) -> str:
    ended = sorted((e for e in page.entries.values() if e.ended_s), key=lambda e: e.ended_s)
    old, recent = ended[:-_KEPT_ENDED], ended[-_KEPT_ENDED:]
    sums = add_up([*page.sums, *fold(old, page.head)])
    lines = [head_line(page.head), *map(sum_line, sums)]
    for entry in [*recent, *page.unfinished]:
        lines += entry_lines(entry)
    return "".join(lines)
