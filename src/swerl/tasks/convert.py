"""Convert a dataset: a Task or a reject for each of its rows, and a count of what happened.

Both files are written under temporary names and renamed at the end. A row writes one line to one
of them; rejects carry their row's number and reach the disk before any later Task. So the lines
that a killed conversion left say which row comes next, and the same call goes on there.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import orjson

from swerl.core.errors import InputError, TaskError
from swerl.core.image_reference import is_local
from swerl.core.task import Task, to_row
from swerl.tasks._resume import Progress, resume
from swerl.tasks._usable import check_usable
from swerl.tasks.datasets import Converter, Row
from swerl.tasks.rows import RowSource

_BUFFER_BYTES = 1 << 20
_NO_UNICODE = "a column holds text that is not valid Unicode"


@dataclass(frozen=True, slots=True)
class Settings:
    """How rows become Tasks, besides the dataset's own rule."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Image -> the name to use in its place, as a mirror's lock file has it; empty for none."""
    assets: Path | None = None
    """Folder with what the rows of some datasets lack."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a conversion did, the part before a break included."""

    num_tasks: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    """How often each reason made a reject."""
    kinds: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(grader, log parser) -> number of Tasks."""
    num_resumed: int = 0
    """Rows that an earlier, broken conversion had done."""

    @property
    def num_rejects(self) -> int:
        """Rows that made no Task."""
        return sum(self.reasons.values())


def convert(
    converter: Converter,
    rows: RowSource,
    out: Path,
    *,
    settings: Settings | None = None,
    tell: Callable[[int], None] = lambda num_rows: None,
) -> Summary:
    """Write Tasks to `out` and rejects beside it; both appear whole, or not at all.

    Where no row makes a Task, what `out` was stays.
    Goes on where the same conversion was broken off. Memory is bounded by a few rows and the ids
    seen. `tell` hears how many rows are done. Raises InputError where a file cannot be used.
    """
    settings = settings or Settings()
    _check_out(out, rows)
    with _claimed(out) as claim:
        parts = (_part(out), _part(rejects_path(out)))
        done = resume(parts, claim, identity_of(converter, rows, settings))
        num_resumed = done.num_rows
        writer = _Writer(converter, settings, done)
        with parts[0].open("ab", _BUFFER_BYTES) as tasks, parts[1].open("ab", 0) as rejects:
            for row in rows.read(num_resumed):
                line, is_task = writer.line(row)
                (tasks if is_task else rejects).write(line)
                tell(done.num_rows)
        parts[1].replace(rejects_path(out))
        if done.ids:
            parts[0].replace(out)
        else:
            parts[0].unlink()
    return Summary(len(done.ids), dict(done.reasons.most_common()), dict(done.kinds), num_resumed)


def rejects_path(out: Path) -> Path:
    """Return the file that holds the rejects of a conversion into `out`."""
    return out.with_name(f"{out.stem}.rejects.jsonl")


class _Writer:
    """Turns rows into lines, and keeps the counts."""

    def __init__(self, converter: Converter, settings: Settings, done: Progress) -> None:
        self._to_task = converter.to_task
        self._settings = settings
        self._done = done
        add = converter.with_assets
        if settings.assets and not add:
            raise InputError(
                f"the rows of {converter.name} need no assets", hint="leave --assets out"
            )
        self._add_assets = add if settings.assets else None

    def line(self, row: Row | TaskError) -> tuple[bytes, bool]:
        """Return the line of a row, and whether it is a Task's."""
        done = self._done
        done.num_rows += 1
        try:
            return self._task_line(row), True
        except TaskError as error:
            done.reasons[str(error)] += 1
            return _reject(done.num_rows, row, error), False

    def _task_line(self, row: Row | TaskError) -> bytes:
        if isinstance(row, TaskError):
            raise row
        if self._add_assets and self._settings.assets:
            row = self._add_assets(row, self._settings.assets)
        task = self._to_task(row)
        check_usable(task)
        task = self._mirrored(task)
        if task.id in self._done.ids:
            raise TaskError("another row has the same id")
        try:
            line = orjson.dumps(to_row(task), option=orjson.OPT_APPEND_NEWLINE)
        except TypeError as error:
            raise TaskError(_NO_UNICODE) from error
        self._done.ids.add(task.id)
        self._done.kinds[task.grading.grader, task.grading.log_parser] += 1
        return line

    def _mirrored(self, task: Task) -> Task:
        images = self._settings.images
        if not images or is_local(task.image):
            return task
        if task.image not in images:
            raise TaskError("the mirror's lock file does not have its image")
        return replace(task, image=images[task.image])


def _reject(number: int, row: Row | TaskError, error: TaskError) -> bytes:
    found = {} if isinstance(row, TaskError) else row
    name = str(found.get("instance_id") or found.get("task_id") or "")
    entry = {"row": number, "id": name, "reason": str(error)}
    shown = {key: _valid(each) if isinstance(each, str) else each for key, each in entry.items()}
    return orjson.dumps(shown, option=orjson.OPT_APPEND_NEWLINE)


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def identity_of(converter: Converter, rows: RowSource, settings: Settings) -> str:
    """Return a text that is the same where a conversion may go on from what is there."""
    images = sorted(settings.images.items())
    parts = [version("swerl"), converter.name, rows.name, str(settings.assets or ""), images]
    return orjson.dumps(parts).decode()


def _check_out(out: Path, rows: RowSource) -> None:
    for path in (out, rejects_path(out)):
        if path.resolve() in rows.files:
            raise InputError(
                f"{path} is one of the files that rows are read from",
                hint="pass -o with another file",
            )
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder", hint="pass -o with a file")


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


@contextmanager
def _claimed(out: Path) -> Iterator[Path]:
    """Yield the file that says which conversion is under way; it goes when that has ended well."""
    path = out.with_name(f"{out.name}.part.json")
    try:
        with path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
            path.unlink()
    except BlockingIOError as error:
        raise InputError(
            f"another conversion is writing {out}", hint="wait for it, or pass -o with another file"
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror}",
            hint="pass -o with a file in a folder that exists",
        ) from error
