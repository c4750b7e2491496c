"""The ledger's folder: a file for each process and use, and an archive of those long over.

    <state>/ledger/  <name>.jsonl …  archive/sums.jsonl  lock

Readers share the lock; who archives holds it alone. Processes append to their own files without.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swerl.core.chat import Json
from swerl.core.errors import RunError
from swerl.core.files import write_text
from swerl.core.liveness import Life, life
from swerl.core.sandbox import new_name
from swerl.core.secrets import state_dir
from swerl.sandboxes.ledger.book import Book
from swerl.sandboxes.ledger.entry import Head, Page, Sum, add_up, fold
from swerl.sandboxes.ledger.lines import read_page, rows_of, sum_line

_MOST_FILES = 64
_DAY_S = 86_400.0
_BY_HOUR_FOR_S = 31 * _DAY_S
"""The archive knows hours for a month, then days."""


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a ledger knows; nothing is in both."""

    pages: list[Page]
    sums: list[Sum]
    """What was archived."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """One folder of records."""

    folder: Path

    def book(self, head: Head) -> Book:
        """Return a book of its own for one process; its file appears with the first intent."""
        return Book(self.folder / f"{new_name().removeprefix('swerl-')}.jsonl", head)

    def pages(self) -> list[Page]:
        """Read every file, the archive left out."""
        with self._locked(fcntl.LOCK_SH):
            return list(self._pages())

    def everything(self) -> Contents:
        """Read every file, and the archive's sums."""
        with self._locked(fcntl.LOCK_SH):
            sums, absorbed = self._archive()
            pages = [page for page in self._pages() if page.path.name not in absorbed]
            return Contents(pages, sums)

    def append(self, page: Page, *lines: str) -> None:
        """Add lines to another process's file. Raises OSError."""
        fd = os.open(page.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, ("\n" + "".join(lines)).encode())
        finally:
            os.close(fd)

    def tidy(self, *, most_files: int = _MOST_FILES) -> None:
        """Move the files of dead processes whose sandboxes are gone into the archive.

        Does nothing while there are few, and where the folder cannot be written.
        """
        if sum(1 for _ in self.folder.glob("*.jsonl")) <= most_files:
            return
        with suppress(OSError, RunError), self._locked(fcntl.LOCK_EX):
            over = [page for page in self._pages() if _is_over(page)]
            sums, absorbed = self._archive()
            for name in absorbed:
                (self.folder / name).unlink(missing_ok=True)
            over = [page for page in over if page.path.name not in absorbed]
            for page in over:
                sums += [*page.sums, *fold(page.entries.values(), page.head)]
            self._write_archive(sums, [page.path.name for page in over])
            for page in over:
                page.path.unlink(missing_ok=True)

    def _pages(self) -> Iterator[Page]:
        for path in sorted(self.folder.glob("*.jsonl")):
            page = read_page(path)
            if page is not None:
                yield page

    @property
    def _sums(self) -> Path:
        return self.folder / "archive" / "sums.jsonl"

    def _archive(self) -> tuple[list[Sum], set[str]]:
        """Return the archive's sums, and the files that they hold already.

        A crash may leave such a file beside the archive; it must not count twice.
        """
        sums, absorbed = [], set[str]()
        for row in rows_of(self._sums):
            if "sum" in row:
                sums.append(Sum(**row["sum"]))  # type: ignore[arg-type]
            else:
                absorbed.update(map(str, _list(row["absorbed"])))
        return sums, absorbed

    def _write_archive(self, sums: list[Sum], absorbed: list[str]) -> None:
        month_ago = time.time() - _BY_HOUR_FOR_S
        rounded = [
            replace(each, began_s=each.began_s // _DAY_S * _DAY_S)
            if each.began_s < month_ago
            else each
            for each in sums
        ]
        lines = [json.dumps({"absorbed": absorbed}) + "\n", *map(sum_line, add_up(rounded))]
        self._sums.parent.mkdir(exist_ok=True, mode=0o700)
        write_text(self._sums, "".join(lines))

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        """Hold the lock; where no lock can be had, nobody archives either."""
        try:
            fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            if how == fcntl.LOCK_EX:
                raise
            yield
            return
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


def default_ledger() -> Ledger:
    """Return the user's ledger."""
    return Ledger(state_dir() / "ledger")


def _is_over(page: Page) -> bool:
    return page.is_settled and life(page.head.owner) is Life.DEAD


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []
