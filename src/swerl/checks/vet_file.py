"""The files of vetting: a journal to go on from, and the Tasks that came out of it.

The journal has a line for each Task vetted, written as it comes; the last one of each counts. The
certified Tasks and the rejected ones are written from it, so that both are whole whatever was
vetted in which call.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from swerl.checks._vet_task import Rigour
from swerl.checks.vet import Vetted
from swerl.core.certificate import certified, from_json, row_digest, to_json
from swerl.core.errors import InputError
from swerl.core.files import disk_errors
from swerl.core.task import to_row
from swerl.tasks import select


def journal_path(out: Path) -> Path:
    """Return the journal of a vetting into `out`."""
    return out.with_name(f"{out.stem}.journal.jsonl")


def rejected_path(out: Path) -> Path:
    """Return the file that holds the Tasks that vetting into `out` rejects."""
    return out.with_name(f"{out.stem}.rejected.jsonl")


@contextmanager
def alone(journal: Path) -> Iterator[None]:
    """Keep other processes off a journal. Raises InputError where one is at work."""
    with ExitStack() as stack:
        with disk_errors(journal):
            lock = stack.enter_context(journal.open("ab"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is vetting into {journal}",
                hint="wait for it, or pass -o with another file",
            ) from error
        yield


def read(journal: Path) -> dict[str, Vetted]:
    """Return what is known by Task id; a line that was cut short is passed over.

    Raises InputError on a file of something else.
    """
    if not journal.exists():
        return {}
    found = {}
    with disk_errors(journal), journal.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                vetted = _from_row(json.loads(line))
            except json.JSONDecodeError:
                continue
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(
                    f"{journal} holds a line that is no result of vetting",
                    hint="pass -o with another file",
                ) from error
            found[vetted.task] = vetted
    return found


def append(journal: Path, vetted: Vetted) -> None:
    """Add a result as one line, on its own even where the last one was cut. Raises RunError."""
    with disk_errors(journal), journal.open("ab+") as out:
        begun = out.tell() > 0
        if begun:
            out.seek(-1, os.SEEK_END)
            begun = out.read(1) != b"\n"
        os.write(out.fileno(), ("\n" * begun + json.dumps(as_row(vetted)) + "\n").encode())


def as_row(vetted: Vetted) -> dict[str, Any]:
    """Return a result as JSON types."""
    certificate = to_json(vetted.certificate) if vetted.certificate else None
    return {
        "task": vetted.task,
        "ok": vetted.ok,
        "rigour": asdict(vetted.rigour),
        "seconds": vetted.seconds,
        "failure": vetted.failure,
        "certificate": certificate,
    }


def write(tasks: Path, out: Path, known: Mapping[str, Vetted]) -> tuple[int, int]:
    """Write the certified Tasks to `out` and the rejected ones beside it; return their numbers.

    A Task whose row was changed since it was vetted, or that was not vetted, is in neither file.
    """
    counts = {True: 0, False: 0}
    with _whole(out) as accepted, _whole(rejected_path(out)) as rejected:
        for _, task in select.lines(tasks):
            vetted = known.get(task.id)
            certificate = vetted.certificate if vetted else None
            if certificate is None or certificate.source != row_digest(task):
                continue
            row = to_row(certified(task, certificate))
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            (accepted if certificate.ok else rejected).write(line)
            counts[certificate.ok] += 1
    return counts[True], counts[False]


@contextmanager
def _whole(path: Path) -> Iterator[Any]:
    """Yield a file that appears under its name when all is written, or not at all."""
    part = path.with_name(f"{path.name}.part")
    with ExitStack() as stack:
        stack.enter_context(disk_errors(path))
        stack.callback(part.unlink, missing_ok=True)
        with part.open("wb") as file:
            yield file
        part.replace(path)


def _from_row(row: Mapping[str, Any]) -> Vetted:
    certificate = row["certificate"]
    return Vetted(
        task=row["task"],
        rigour=Rigour(**row["rigour"]),
        seconds=row["seconds"],
        failure=row["failure"],
        certificate=None if certificate is None else from_json(certificate),
    )
