"""The ledger's files as lines of JSON: a head, then one line for each thing that happened.

Whatever cannot be read, such as a last line that a crash cut short, is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from swerl.core.chat import Json
from swerl.core.liveness import ProcessIdentity
from swerl.sandboxes.ledger.entry import Entry, Head, Page, Sum

_FORMAT = 1


def head_line(head: Head) -> str:
    """Return the first line of a file."""
    return _line({"ledger": _FORMAT, **asdict(head)})


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
        owner = ProcessIdentity(**first["owner"])  # type: ignore[arg-type]
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
