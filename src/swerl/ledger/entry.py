"""What the ledger knows about sandboxes, and how that reads as lines of JSON.

A file is a head line, then one line for each thing that happened. Whatever cannot be read, such
as a last line that a crash cut short, is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from swerl.chat import Json
from swerl.ledger.owner import Owner

HOUR_S = 3600.0
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Head:
    """What all sandboxes of one file share."""

    backend: str
    settings: Mapping[str, Json]
    """The backend's settings, secrets left out: what it takes to reach the provider again."""
    run: str
    """What the sandboxes are used for."""
    owner: Owner


@dataclass(frozen=True, slots=True)
class Entry:
    """One sandbox, from the intent to its end. Times are seconds since 1970, 0 for not yet."""

    name: str
    image: str
    intended_s: float
    lifetime_s: float
    price: float = 0.0
    """US dollars an hour."""
    id: str = ""
    """What the provider calls it."""
    opened_s: float = 0.0
    ended_s: float = 0.0
    why: str = ""
    """Why it ended, or why it is in doubt."""
    in_doubt: bool = False
    """Whether it should be gone without anybody having seen that it is."""

    @property
    def deadline_s(self) -> float:
        """When its lifetime is over."""
        return (self.opened_s or self.intended_s) + self.lifetime_s

    def seconds(self, now_s: float) -> float:
        """Return how long it has lived until it ended, or until `now_s`."""
        return max((self.ended_s or now_s) - self.opened_s, 0.0) if self.opened_s else 0.0

    def cost(self, now_s: float) -> float:
        """Return its cost so far in US dollars."""
        return self.seconds(now_s) / HOUR_S * self.price


@dataclass(frozen=True, slots=True)
class Sum:
    """Ended sandboxes of one run and backend that began in the same hour (or day)."""

    began_s: float
    run: str
    backend: str
    num_sandboxes: int = 0
    seconds: float = 0.0
    cost: float = 0.0

    def plus(self, other: Sum) -> Sum:
        """Return both in one."""
        return replace(
            self,
            num_sandboxes=self.num_sandboxes + other.num_sandboxes,
            seconds=self.seconds + other.seconds,
            cost=self.cost + other.cost,
        )


@dataclass(slots=True)
class Page:
    """One file of the ledger."""

    path: Path
    head: Head
    entries: dict[str, Entry] = field(default_factory=dict)
    sums: list[Sum] = field(default_factory=list)

    @property
    def unfinished(self) -> list[Entry]:
        """The sandboxes without an end."""
        return [entry for entry in self.entries.values() if not entry.ended_s]


def head_line(head: Head) -> str:
    """Return the first line of a file."""
    return _line({"ledger": FORMAT, **asdict(head)})


def intent_line(entry: Entry) -> str:
    """Return the line that says that a sandbox is about to be created."""
    rest: dict[str, Json] = {"image": entry.image, "lifetime_s": entry.lifetime_s}
    if entry.price:
        rest["price"] = entry.price
    return _event("intent", entry.name, entry.intended_s, **rest)


def opened_line(name: str, at_s: float, *, id: str) -> str:
    """Return the line that says that a sandbox is there."""
    return _event("open", name, at_s, **({} if id == name else {"id": id}))


def ended_line(name: str, at_s: float, *, why: str) -> str:
    """Return the line that says that a sandbox is gone."""
    return _event("end", name, at_s, why=why)


def doubted_line(name: str, at_s: float, *, why: str) -> str:
    """Return the line that says that a sandbox should be gone, and that nobody has seen it."""
    return _event("doubt", name, at_s, why=why)


def sum_line(total: Sum) -> str:
    """Return the line that stands for many ended sandboxes."""
    return _line({"sum": asdict(total)})


def entry_lines(entry: Entry) -> Iterator[str]:
    """Yield the lines that tell what is known of a sandbox."""
    yield intent_line(entry)
    if entry.opened_s:
        yield opened_line(entry.name, entry.opened_s, id=entry.id)
    if entry.in_doubt:
        yield doubted_line(entry.name, entry.opened_s or entry.intended_s, why=entry.why)
    if entry.ended_s:
        yield ended_line(entry.name, entry.ended_s, why=entry.why)


def read_page(path: Path) -> Page | None:
    """Read a file. Returns None where it has no head: no sandbox was created under it."""
    rows = rows_of(path)
    first = next(rows, {})
    try:
        owner = Owner(**first["owner"])  # type: ignore[arg-type]
        head = Head(first["backend"], first["settings"], first["run"], owner)  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return None
    page = Page(path, head)
    for row in rows:
        try:
            _apply(page, row)
        except (KeyError, TypeError):
            continue
    return page


def rows_of(path: Path) -> Iterator[dict[str, Json]]:
    """Yield the objects in a file of JSON lines; nothing where it is gone."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def fold(entries: Iterable[Entry], head: Head) -> list[Sum]:
    """Add up ended sandboxes by the hour in which they began; what never was counts nothing."""
    return add_up(
        Sum(
            entry.opened_s // HOUR_S * HOUR_S,
            head.run,
            head.backend,
            num_sandboxes=1,
            seconds=entry.seconds(entry.ended_s),
            cost=entry.cost(entry.ended_s),
        )
        for entry in entries
        if entry.opened_s
    )


def add_up(sums: Iterable[Sum]) -> list[Sum]:
    """Add up what began in the same hour for the same run and backend."""
    totals: dict[tuple[float, str, str], Sum] = {}
    for each in sums:
        key = (each.began_s, each.run, each.backend)
        totals[key] = totals[key].plus(each) if key in totals else each
    return list(totals.values())


def _apply(page: Page, row: dict[str, Json]) -> None:
    """Take in one line; the first end that somebody wrote counts."""
    if total := row.get("sum"):
        page.sums.append(Sum(**total))  # type: ignore[arg-type]
        return
    kind, name, at_s = str(row["event"]), str(row["name"]), float(row["at"])  # type: ignore[arg-type]
    if kind == "intent":
        page.entries.setdefault(
            name,
            Entry(
                name,
                str(row["image"]),
                at_s,
                float(row["lifetime_s"]),  # type: ignore[arg-type]
                float(row.get("price", 0.0)),  # type: ignore[arg-type]
            ),
        )
        return
    entry = page.entries[name]
    if kind == "open":
        entry = replace(entry, opened_s=at_s, id=str(row.get("id", name)))
    elif kind == "doubt":
        entry = replace(entry, in_doubt=True, why=str(row["why"]))
    elif kind == "end" and not entry.ended_s:
        entry = replace(entry, ended_s=at_s, why=str(row["why"]))
    page.entries[name] = entry


def _event(kind: str, name: str, at_s: float, **rest: Json) -> str:
    return _line({"event": kind, "name": name, "at": round(at_s, 3), **rest})


def _line(value: Mapping[str, object]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str) + "\n"
