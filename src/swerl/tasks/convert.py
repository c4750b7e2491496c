"""Convert a dataset: each row becomes a Task or a reject with its reason.

Both files are written under temporary names and renamed at the end. Each row adds one line to one
of them; a reject includes its row number and is written before any later Task. After a crash the
lines show which row is next, so the same call resumes there.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from swerl.core.errors import InputError, TaskError, shortened
from swerl.core.image_reference import is_local, parse
from swerl.core.task import Task, to_row
from swerl.tasks.datasets import Converter, Row
from swerl.tasks.rows import RowSource

_BUFFER_BYTES = 1 << 20
_MOST_REASON_CHARS = 300
_NO_UNICODE = "a column holds text that is not valid Unicode"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a conversion, besides the dataset's own rule."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Image -> its name in a mirror, from the mirror's lock file; empty: no replacement."""
    assets: Path | None = None
    """Folder with data that is missing in the rows of some datasets."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a conversion, including the part before an interruption."""

    num_tasks: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of rejects."""
    kinds: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(grader, log parser) -> number of Tasks."""
    num_resumed: int = 0
    """Rows done by an earlier, interrupted conversion."""

    @property
    def num_rejects(self) -> int:
        return sum(self.reasons.values())


def convert(
    converter: Converter,
    rows: RowSource,
    out: Path,
    *,
    settings: Settings | None = None,
    tell: Callable[[int], None] = lambda num_rows: None,
) -> Summary:
    """Write Tasks to `out` and rejects beside it, both atomically.

    If no row converts, `out` is left unchanged. An interrupted conversion is resumed. Memory is
    bounded by a few rows and the ids seen. `tell` is called with the number of rows done. Raises
    InputError if a file cannot be used.
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


def is_begun(out: Path) -> bool:
    """Return True if an interrupted conversion into `out` can be resumed."""
    return _claim(out).exists()


def rejects_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}.rejects.jsonl")


class _Writer:
    """Turns rows into lines and counts them."""

    def __init__(self, converter: Converter, settings: Settings, done: Progress) -> None:
        self._to_task = converter.to_task
        self._settings = settings
        self._done = done
        add = converter.with_assets
        if settings.assets and not add:
            raise InputError(f"the rows of {converter.name} need no assets", hint="remove --assets")
        self._add_assets = add if settings.assets else None

    def line(self, row: Row | TaskError) -> tuple[bytes, bool]:
        done = self._done
        done.num_rows += 1
        try:
            return self._task_line(row), True
        except (TaskError, UnicodeEncodeError) as error:
            reason = str(error) if isinstance(error, TaskError) else _NO_UNICODE
            reason = shortened(reason, _MOST_REASON_CHARS)  # it may show a value of the row
            done.reasons[reason] += 1
            return _reject(done.num_rows, row, reason), False

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


def _reject(number: int, row: Row | TaskError, reason: str) -> bytes:
    found = {} if isinstance(row, TaskError) else row
    name = str(found.get("instance_id") or found.get("task_id") or "")[:_MOST_REASON_CHARS]
    entry = {"row": number, "id": name, "reason": reason}
    shown = {key: _valid(each) if isinstance(each, str) else each for key, each in entry.items()}
    return orjson.dumps(shown, option=orjson.OPT_APPEND_NEWLINE)


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def identity_of(converter: Converter, rows: RowSource, settings: Settings) -> str:
    """Return a text that identifies a conversion: only the same one may resume."""
    images = sorted(settings.images.items())
    parts = [version("swerl"), converter.name, rows.name, str(settings.assets or ""), images]
    return orjson.dumps(parts).decode()


def _check_out(out: Path, rows: RowSource) -> None:
    for path in (out, rejects_path(out)):
        if path.resolve() in rows.files:
            raise InputError(
                f"{path} is one of the input files",
                hint="pass -o with another file",
            )
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder", hint="pass -o with a file")


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _claim(out: Path) -> Path:
    return out.with_name(f"{out.name}.part.json")


@contextmanager
def _claimed(out: Path) -> Iterator[Path]:
    """Yield the file that identifies the running conversion; it is deleted on success."""
    path = _claim(out)
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
            hint="pass -o with a file in a folder that you may write to",
        ) from error


@dataclass(slots=True)
class Progress:
    num_rows: int = 0
    ids: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason -> number of rejects."""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(grader, log parser) -> number of Tasks."""


def resume(parts: tuple[Path, Path], claim: Path, identity: str) -> Progress:
    """Return the state in the two files, cut to whole lines; another conversion's are emptied.

    Every reject before the last Task has been written, and perhaps some after it: those in the
    directly following rows are kept.
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
    """Count the rejects before the first missing Task; return the size of their lines."""
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


_MAX_ID_BYTES = 200
"""An Episode's folder has the id and a number as its name; file systems allow 255 bytes."""
_PLAIN_IMAGE = re.compile(r"[a-z0-9]+(?:[._/-][a-z0-9]+)*(?::[\w.-]{1,128})?", re.ASCII)
"""The form of most images; the complete rule is thirty times slower."""


def check_usable(task: Task) -> None:
    """Raise TaskError if the id, the image or the prompt is unusable on every machine."""
    if not task.id.isprintable() or len(task.id.encode("utf-8", "replace")) > _MAX_ID_BYTES:
        raise TaskError(f"the id has a control character or over {_MAX_ID_BYTES} bytes")
    if "\0" in task.prompt:
        raise TaskError("the prompt has a NUL character, which no program accepts")
    if _PLAIN_IMAGE.fullmatch(task.image) or is_local(task.image):
        return
    try:
        parse(task.image)
    except InputError as error:
        raise TaskError(f"its image {error}") from error
