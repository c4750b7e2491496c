"""What one process writes into the ledger, and what happens where it cannot."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from swerl.core.chat import Json
from swerl.core.errors import SandboxError
from swerl.core.liveness import this_process
from swerl.sandboxes.ledger.book import Book
from swerl.sandboxes.ledger.entry import Entry, Head
from swerl.sandboxes.ledger.store import Ledger


class Records:
    """What one process writes about its sandboxes of one backend and run."""

    def __init__(
        self,
        ledger: Ledger,
        backend: str,
        settings: Mapping[str, Json],
        *,
        run: str,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ledger = ledger
        self._backend = backend
        self._settings = settings
        self._run = run
        self._warn = warn
        self._has_warned = False
        self._pid = 0
        self._book: Book

    def intend(self, entry: Entry) -> None:
        """Write that a sandbox is about to be created.

        Raises SandboxError where that fails and the sandbox costs money.
        """
        if self._pid != os.getpid():  # a fork is another owner and writes another file
            head = Head(self._backend, self._settings, self._run, this_process())
            self._book, self._pid = self._ledger.book(head), os.getpid()
        try:
            self._book.intend(entry)
        except OSError as error:
            where = f"the ledger in {self._ledger.folder}: {error.strerror or error}"
            if entry.price:
                message = f"no paid sandbox without a record of it, and nothing can write {where}"
                hint = "free some space there, or name another folder in SWERL_STATE"
                raise SandboxError(message, hint=hint) from error
            if not self._has_warned:
                self._warn(f"cannot write {where}; `swerl sandbox reap` will not know these")
            self._has_warned = True

    def opened(self, name: str, *, id: str) -> None:
        """Write that a sandbox is there."""
        self._note(lambda book: book.opened(name, id=id))

    def ended(self, name: str, *, why: str) -> None:
        """Write that a sandbox is gone."""
        self._note(lambda book: book.ended(name, why=why))

    def doubted(self, name: str, *, why: str) -> None:
        """Write that a sandbox should be gone, and that nobody has seen it."""
        self._note(lambda book: book.doubted(name, why=why))

    def _note(self, write: Callable[[Book], None]) -> None:
        """Add to an intent. Without the line `reap` looks for a sandbox that is gone: no harm."""
        if self._pid == os.getpid():
            try:
                write(self._book)
            except OSError:
                return
