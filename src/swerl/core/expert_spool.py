"""Experts of Sessions that are open: on disk from the reply on, a file a Session.

So memory does not grow with the Episodes under way. Whoever writes an Episode links its file and
drops this one; what a killed run left is cleared when the run is opened.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swerl.core import expert_files
from swerl.core.errors import RunError
from swerl.core.turn import RoutedExperts


@dataclass(frozen=True, slots=True)
class ExpertSpool:
    """A folder of such files; any thread or process of this machine may write a Session's."""

    folder: Path

    def keep(self, session: str, piece: RoutedExperts) -> RoutedExperts:
        """Return what a reply recorded as it lies on disk, or as it was where the disk refuses.

        The agent has its reply then; whoever writes the Episode finds the disk full, and says so.
        """
        try:
            return expert_files.append(self._file(session), piece)
        except RunError:
            return piece

    def drop(self, session: str) -> None:
        """Delete a Session's file; under other names it stays."""
        with suppress(OSError):
            self._file(session).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete all of them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, session: str) -> Path:
        return self.folder / f"{session}.bin"


@contextmanager
def open_spool(folder: Path) -> Iterator[ExpertSpool]:
    """Open an empty spool, and leave nothing of it."""
    spool = ExpertSpool(folder)
    spool.clear()
    try:
        yield spool
    finally:
        spool.clear()
