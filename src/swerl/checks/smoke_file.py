"""The file of results: a line for each image, written as it comes; the last one of each counts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

from swerl.checks.smoke import Place, Smoke
from swerl.core.chat import Json
from swerl.core.errors import InputError
from swerl.core.files import disk_errors

_FIELDS = {each.name for each in fields(Smoke)}


def read(path: Path, backend: str) -> dict[Place, Smoke]:
    """Return the results for this backend. Raises InputError on a file of something else.

    A line that was cut short is passed over.
    """
    if not path.exists():
        return {}
    found: dict[Place, Smoke] = {}
    others = 0
    with disk_errors(path), path.open(encoding="utf-8", errors="replace") as lines:
        for row in _rows(lines):
            try:
                result = Smoke(**{k: v for k, v in row.items() if k in _FIELDS})  # type: ignore[arg-type]
            except TypeError:
                others += 1
                continue
            if row.get("backend") == backend:
                found[result.place] = result
    if others:
        raise InputError(
            f"{path} holds {others} lines that are no smoke results",
            hint="name another file with --out",
        )
    return found


def append(path: Path, result: Smoke, backend: str) -> None:
    """Add a result in one write, on a line of its own. Raises RunError."""
    line = json.dumps({"backend": backend, "ok": result.ok, **asdict(result)}) + "\n"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as out:
            begun = out.tell() > 0 and not _ends_with_newline(path)
            os.write(out.fileno(), ("\n" * begun + line).encode())


def _rows(lines: Iterable[str]) -> Iterator[dict[str, Json]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        yield row if isinstance(row, dict) else {}


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
