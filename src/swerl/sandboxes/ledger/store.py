"""The ledger: one SQLite database of every sandbox, from its intent to its end.

    <state>/ledger/ledger.sqlite3

All processes write it at once, each change as one transaction. A committed row survives `kill -9`
of its process. A power cut may lose the last rows, but does not damage the file. The database is in
WAL mode. WAL needs shared memory, which a network file system lacks: there it keeps a rollback
journal.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swerl.core.errors import RunError
from swerl.core.liveness import Life, ProcessIdentity, life
from swerl.core.sandbox import new_name
from swerl.core.secrets import state_dir

HOUR_S = 3600.0
FAILURES = (OSError, sqlite3.Error)
"""Errors of a ledger that cannot be written."""
_FORMAT = 1
_BUSY_TIMEOUT_S = 20.0
_KEPT_ENDED = 2000
"""Sandboxes that ended last stay in the database one by one, for `ps --all`: about 1 MiB."""
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "juicefs", "lustre", "nfs", "nfs4",
    "orangefs", "smb3", "sshfs", "virtiofs",
}  # fmt: skip
"""File systems that several hosts may mount, as /proc/self/mountinfo names them."""
_SCHEMA = f"""
BEGIN;
CREATE TABLE sandboxes (
    backend TEXT, settings TEXT, run TEXT, owner TEXT, name TEXT, image TEXT, intended_s REAL,
    lifetime_s REAL, price REAL, id TEXT, opened_s REAL, ended_s REAL, why TEXT, in_doubt INTEGER,
    row INTEGER PRIMARY KEY
);
CREATE INDEX sandboxes_by_name ON sandboxes (name);
CREATE TABLE sums (
    began_s REAL, run TEXT, backend TEXT, num_sandboxes INTEGER, seconds REAL, cost REAL,
    PRIMARY KEY (began_s, run, backend)
);
PRAGMA user_version = {_FORMAT};
COMMIT;
"""
_INSERT = f"INSERT INTO sandboxes VALUES ({', '.join('?' * 14)}, NULL)"
_ADD_SUM = """
INSERT INTO sums VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    num_sandboxes = num_sandboxes + excluded.num_sandboxes,
    seconds = seconds + excluded.seconds,
    cost = cost + excluded.cost
"""
_OLD = "SELECT * FROM sandboxes WHERE ended_s ORDER BY ended_s DESC, row DESC LIMIT -1 OFFSET ?"


@dataclass(frozen=True, slots=True)
class Use:
    """The use of one backend by one process for one run."""

    backend: str
    settings: str
    """The backend's settings without secrets, enough to reach the provider again: a JSON object
    with sorted keys."""
    run: str
    owner: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Entry:
    """One sandbox, from the intent to its end. Times are Unix seconds, 0 for not yet."""

    use: Use
    name: str
    image: str
    intended_s: float
    lifetime_s: float
    price: float = 0.0
    """US dollars an hour."""
    id: str = ""
    """The provider's id."""
    opened_s: float = 0.0
    ended_s: float = 0.0
    why: str = ""
    """The reason for its end or for the doubt."""
    in_doubt: bool = False
    """True if it should be gone, but its removal was not confirmed."""
    row: int = 0
    """Its row in the database; 0 if it has none."""

    @property
    def deadline_s(self) -> float:
        """Time at which its lifetime is over."""
        return (self.opened_s or self.intended_s) + self.lifetime_s

    @property
    def is_settled(self) -> bool:
        """True if it is gone for good. A paid one without an answer may appear later."""
        may_appear = self.price and not self.opened_s and time.time() < self.deadline_s
        return bool(self.ended_s) and not may_appear

    def cost(self, now_s: float) -> float:
        """Return its cost until its end, or until `now_s`, in US dollars."""
        return self.seconds(now_s) / HOUR_S * self.price

    def seconds(self, now_s: float) -> float:
        """Return its age at its end, or at `now_s`."""
        return max((self.ended_s or now_s) - self.opened_s, 0.0) if self.opened_s else 0.0


@dataclass(frozen=True, slots=True)
class Sum:
    """The ended sandboxes of one run and backend that began in the same hour."""

    began_s: float
    run: str
    backend: str
    num_sandboxes: int
    seconds: float
    cost: float


@dataclass(frozen=True, slots=True)
class Contents:
    """The whole ledger. Each sandbox is either an entry or part of a sum."""

    entries: list[Entry]
    sums: list[Sum]


@dataclass(frozen=True, slots=True)
class Ledger:
    """The database in one folder."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "ledger.sqlite3"

    def read(self) -> Contents:
        """Return all entries and sums; none if there is no database. Raises RunError."""
        if not self.path.exists():
            return Contents([], [])
        try:
            with closing(self._open_to_read()) as db:
                db.execute("BEGIN")  # both tables as of the same moment
                entries = _entries(db.execute("SELECT * FROM sandboxes"))
                return Contents(entries, [Sum(*row) for row in db.execute("SELECT * FROM sums")])
        except FAILURES as error:
            hint = "move it away to start a new one; check each provider for sandboxes left over"
            raise RunError(f"cannot read {self.path}: {error}", hint=hint) from error

    def has_leftovers(self, run: str) -> bool:
        """Return whether a dead owner left sandboxes of this run. Raises RunError."""
        left = (each.use for each in self.read().entries if not each.is_settled)
        owners = {use.owner for use in left if use.run == run}
        return any(life(owner) is Life.DEAD for owner in owners)

    def open(self) -> sqlite3.Connection:
        """Open the database to write it; create it if there is none.

        The connection commits each statement by itself. Raises OSError and sqlite3.Error.
        """
        if not self.path.exists():
            self._create()
        db = self._connect("mode=rw")
        try:
            self._set_journal(db)
        except sqlite3.Error:
            db.close()
            raise
        return db

    def add(self, db: sqlite3.Connection, entry: Entry) -> Entry:
        """Insert an entry; return it with its row."""
        use = entry.use
        owner = json.dumps(asdict(use.owner))
        known = astuple(entry)[1:-1]
        row = db.execute(_INSERT, (use.backend, use.settings, use.run, owner, *known)).lastrowid
        return replace(entry, row=row or 0)

    def set_opened(self, db: sqlite3.Connection, entry: Entry, *, id: str, at_s: float) -> None:
        # The row number of a database that was deleted may belong to another sandbox by now.
        done = "UPDATE sandboxes SET id = ?, opened_s = ? WHERE row = ? AND name = ?"
        db.execute(done, (id, at_s, entry.row, entry.name))

    def set_doubt(self, db: sqlite3.Connection, entry: Entry, *, why: str) -> None:
        """Record that the sandbox should be gone, but that its removal was not confirmed."""
        done = "UPDATE sandboxes SET why = ?, in_doubt = 1 WHERE row = ? AND name = ?"
        db.execute(done, (why, entry.row, entry.name))

    def set_ended(self, db: sqlite3.Connection, name: str, *, why: str, at_s: float) -> None:
        """Record the end of the sandbox of this name; the first recorded end counts."""
        done = "UPDATE sandboxes SET why = ?, ended_s = ? WHERE name = ? AND NOT ended_s"
        db.execute(done, (why, at_s, name))

    def tidy(self, *, keep: int = _KEPT_ENDED) -> None:
        """Add all but the `keep` sandboxes that ended last to the sums, in one transaction.

        Does nothing if the database cannot be written.
        """
        if not self.path.exists():
            return
        with suppress(*FAILURES), closing(self.open()) as db:
            db.execute("BEGIN IMMEDIATE")
            # A sandbox that may still appear at its provider keeps its row.
            old = [entry for entry in _entries(db.execute(_OLD, (keep,))) if entry.is_settled]
            db.executemany(_ADD_SUM, map(astuple, add_up(old)))
            db.executemany("DELETE FROM sandboxes WHERE row = ?", [(each.row,) for each in old])
            db.execute("COMMIT")

    def notices(self) -> list[str]:
        """Return warnings for the user of this folder, one line each."""
        found = []
        old = [*self.folder.glob("*.jsonl"), *self.folder.glob("archive/*.jsonl")]
        if old:
            found.append(
                f"{len(old)} ledger files of an earlier release in {self.folder} are not read: run "
                "`swerl sandbox reap` of that release, then delete *.jsonl and archive/ there"
            )
        if (kind := _file_system(self.folder)) in _NETWORK:
            found.append(
                f"the ledger in {self.folder} is on a network file system ({kind}), so a record "
                "takes longer; SWERL_STATE can name a local folder"
            )
        return found

    def _create(self) -> None:
        """Create the database under a temporary name, then link it: it is never seen half made."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.folder / f".{new_name()}"
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with closing(sqlite3.connect(temporary, isolation_level=None)) as db:
                self._set_journal(db)
                db.executescript(_SCHEMA)
            with suppress(FileExistsError):  # another process was faster
                os.link(temporary, self.path)
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)

    def _set_journal(self, db: sqlite3.Connection) -> None:
        mode = "DELETE" if _file_system(self.folder) in _NETWORK else "WAL"
        with suppress(sqlite3.OperationalError):  # this file system has no WAL: the mode stays
            db.execute(f"PRAGMA journal_mode = {mode}")
        db.execute("PRAGMA synchronous = NORMAL")

    def _open_to_read(self) -> sqlite3.Connection:
        # Even a reader of a WAL database writes to its side files.
        if os.access(self.folder, os.W_OK):
            return self._connect("mode=rw")
        try:
            return self._connect("mode=ro")
        except sqlite3.OperationalError:  # WAL's side files are absent and cannot be created
            return self._connect("immutable=1")

    def _connect(self, how: str) -> sqlite3.Connection:
        url = f"file:{quote(str(self.path))}?{how}"
        db = sqlite3.connect(
            url, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            (found,) = db.execute("PRAGMA user_version").fetchone()
            if found != _FORMAT:
                raise sqlite3.DatabaseError(f"it has format {found}, this release reads {_FORMAT}")
        except sqlite3.Error:
            db.close()
            raise
        return db


def default_ledger() -> Ledger:
    """Return the user's ledger."""
    return Ledger(state_dir() / "ledger")


def add_up(entries: Iterable[Entry]) -> list[Sum]:
    """Add up ended sandboxes by run, backend and the hour in which they began.

    A sandbox that never opened is not counted.
    """
    totals: dict[tuple[float, str, str], Sum] = {}
    for entry in entries:
        if not entry.opened_s:
            continue
        key = (entry.opened_s // HOUR_S * HOUR_S, entry.use.run, entry.use.backend)
        old = totals.get(key, Sum(*key, num_sandboxes=0, seconds=0.0, cost=0.0))
        totals[key] = replace(
            old,
            num_sandboxes=old.num_sandboxes + 1,
            seconds=old.seconds + entry.seconds(entry.ended_s),
            cost=old.cost + entry.cost(entry.ended_s),
        )
    return list(totals.values())


def _entries(rows: Iterable[Sequence[Any]]) -> list[Entry]:
    """Make entries of rows; those of one process and run share their `use`."""
    uses: dict[Sequence[Any], Use] = {}
    entries = []
    for row in rows:
        backend, settings, run, owner = head = row[:4]
        if head not in uses:
            uses[head] = Use(backend, settings, run, ProcessIdentity(**json.loads(owner)))
        entries.append(Entry(uses[head], *row[4:]))
    return entries


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder; empty if it cannot be found out."""
    while not folder.exists():
        folder = folder.parent
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == wanted:
                return line.partition(" - ")[2].split()[0].removeprefix("fuse.")
    return ""
