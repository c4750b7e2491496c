"""The files of vetting: a journal to resume from, and the certified and rejected Tasks.

The journal gets a line for each vetted Task; the last line of each Task counts. The certified and
the rejected Tasks are written from the whole journal, so both files are complete no matter which
call vetted which Task.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from swerl.checks.vet import Vetted
from swerl.core.certificate import certified, row_digest, to_json
from swerl.core.errors import InputError
from swerl.core.files import disk_errors, replacing
from swerl.core.jobs import append_result, read_results
from swerl.core.task import to_row
from swerl.tasks import select


def journal_path(out: Path) -> Path:
    """Return the journal of a vetting into `out`."""
    return out.with_name(f"{out.stem}.journal.jsonl")


def rejected_path(out: Path) -> Path:
    """Return the file of the Tasks that a vetting into `out` rejects."""
    return out.with_name(f"{out.stem}.rejected.jsonl")


@contextmanager
def locked(journal: Path) -> Iterator[None]:
    """Lock a journal against other processes. Raises InputError if one holds the lock."""
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
    """Return the results by Task id. Raises InputError on a file of something else."""
    from_row, hint = TypeAdapter(Vetted).validate_python, "pass -o with another file"
    rows = read_results(journal, from_row, kind="result of vetting", hint=hint)
    return {vetted.task: vetted for vetted in rows}


def append(journal: Path, vetted: Vetted) -> None:
    """Append a result as one line. Raises RunError."""
    append_result(journal, as_row(vetted))


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

    A Task that was not vetted, or whose row has changed since, is in neither file.
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
    """Yield a file that appears under its name once all is written, or not at all."""
    with replacing(path) as part, part.open("wb") as file:
        yield file
