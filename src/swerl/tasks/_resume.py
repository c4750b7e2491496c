"""What a conversion has done so far, read back from the lines that a killed one left."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson


@dataclass(slots=True)
class Progress:
    """How far a conversion is."""

    num_rows: int = 0
    ids: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    """How often each reason made a reject."""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many Tasks each pair of grader and log parser has."""


def resume(parts: tuple[Path, Path], claim: Path, identity: str) -> Progress:
    """Return what the two files hold, cut to whole lines; another conversion's are emptied.

    Every reject before the last Task is there, and some after it may be: those that follow it row
    by row are kept.
    """
    same = claim.read_text() == identity and all(part.is_file() for part in parts)
    if not same:
        for part in parts:
            part.write_bytes(b"")
        claim.write_text(identity)
        return Progress()
    done = Progress()
    _cut(parts[0], _read_tasks(parts[0], done))
    _cut(parts[1], _read_rejects(parts[1], done))
    return done


def _read_tasks(path: Path, done: Progress) -> int:
    """Count the Tasks; return the size of the whole lines."""
    size = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            row = orjson.loads(line)
            grading: dict[str, Any] = row["metadata"]["swerl"]["grading"]
            done.ids.add(row["label"])
            done.kinds[grading["grader"], grading["log_parser"]] += 1
            size += len(line)
    return size


def _read_rejects(path: Path, done: Progress) -> int:
    """Count the rejects that no missing Task comes before; return the size of their lines."""
    size, num_tasks, num_rejects = 0, len(done.ids), 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            entry = orjson.loads(line)
            if entry["row"] > num_tasks + num_rejects + 1:
                break
            num_rejects += 1
            done.reasons[entry["reason"]] += 1
            size += len(line)
    done.num_rows = num_tasks + num_rejects
    return size


def _cut(path: Path, size: int) -> None:
    if path.stat().st_size != size:
        os.truncate(path, size)
