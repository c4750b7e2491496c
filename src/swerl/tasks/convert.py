"""Convert a dataset: each row becomes a Task or a reject with its reason.

Both files are written under temporary names and renamed at the end. Converting takes 30 µs a row,
so an interrupted conversion starts again.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from swerl.core.errors import InputError, TaskError, shortened
from swerl.core.image_reference import is_local, parse
from swerl.core.task import Task, download_in, to_row
from swerl.tasks.datasets import Converter, Row

_BUFFER_BYTES = 1 << 20
_MAX_REASON_CHARS = 300
_NO_UNICODE = "a column holds text that is not valid Unicode"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a conversion, besides the dataset's own rule."""

    assets: Path | None = None
    """Folder with data that is missing in the rows of some datasets."""


@dataclass(slots=True)
class Summary:
    """Result of a conversion."""

    num_tasks: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason -> number of rejects."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Problem that may make Tasks unusable -> number of Tasks."""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(grader, log parser) -> number of Tasks."""

    @property
    def num_rejects(self) -> int:
        return self.reasons.total()


def convert(
    converter: Converter,
    rows: Iterable[Row | TaskError],
    out: Path,
    *,
    settings: Settings | None = None,
    report: Callable[[int], None] = lambda num_rows: None,
) -> Summary:
    """Write Tasks to `out` and rejects beside it, both atomically.

    If no row converts, `out` is left unchanged. Memory is bounded by a few rows and the ids.
    `report` is called with the number of rows done. Raises InputError if a file cannot be used.
    """
    if out.is_dir():
        raise InputError(f"cannot write {out}: it is a folder", hint="pass -o with a file")
    rejects = rejects_path(out)
    parts = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in (out, rejects)}
    writer = _Writer(converter, settings or Settings())
    try:
        with (
            parts[out].open("wb", _BUFFER_BYTES) as task_file,
            parts[rejects].open("wb") as reject_file,
        ):
            for number, row in enumerate(rows, 1):
                try:
                    task_file.write(writer.line(row))
                except (TaskError, UnicodeEncodeError) as error:
                    reject_file.write(writer.reject(number, row, error))
                report(number)
        parts[rejects].replace(rejects)
        if writer.ids:
            parts[out].replace(out)
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror}",
            hint="pass -o with a file in a folder that you may write to",
        ) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    return writer.summary


def rejects_path(out: Path) -> Path:
    return out.with_name(f"{out.stem}.rejects.jsonl")


class _Writer:
    """Turns rows into lines and counts them."""

    def __init__(self, converter: Converter, settings: Settings) -> None:
        self.ids: set[str] = set()
        self.summary = Summary()
        self._to_task = converter.to_task
        self._assets = settings.assets
        self._with_assets = converter.with_assets
        if settings.assets and not converter.with_assets:
            raise InputError(f"the rows of {converter.name} need no assets", hint="remove --assets")

    def line(self, row: Row | TaskError) -> bytes:
        """Return the line of a row's Task. Raises TaskError with the reason for a reject."""
        if isinstance(row, TaskError):
            raise row
        if self._with_assets and self._assets:
            row = self._with_assets(row, self._assets)
        task = self._to_task(row)
        check_usable(task)
        if task.id in self.ids:
            raise TaskError("another row has the same id")
        try:
            line = orjson.dumps(to_row(task), option=orjson.OPT_APPEND_NEWLINE)
        except TypeError as error:
            raise TaskError(_NO_UNICODE) from error
        self.ids.add(task.id)
        self.summary.num_tasks += 1
        self.summary.kinds[task.grading.grader, task.grading.log_parser] += 1
        if command := download_in(task.grading):
            self.summary.warnings[f"the tests run `{command}`, and no sandbox has a network"] += 1
        elif task.metadata.get("allow_internet"):
            self.summary.warnings["the task allows a network, which no sandbox has"] += 1
        if artefacts := task.metadata.get("log_artefacts"):
            self.summary.warnings[f"{task.id}: dropped ids that are no tests: {artefacts}"] += 1
        return line

    def reject(self, number: int, row: Row | TaskError, error: Exception) -> bytes:
        """Count a reject and return its line."""
        reason = str(error) if isinstance(error, TaskError) else _NO_UNICODE
        reason = shortened(reason, _MAX_REASON_CHARS)  # it may show a value of the row
        self.summary.reasons[reason] += 1
        columns = {} if isinstance(row, TaskError) else row
        name = str(columns.get("instance_id") or columns.get("task_id") or "")[:_MAX_REASON_CHARS]
        entry = {"row": number, "id": _valid(name), "reason": _valid(reason)}
        return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_MAX_ID_BYTES = 200
"""An Episode's folder has the id and a number as its name; file systems allow 255 bytes."""
_PLAIN_IMAGE = re.compile(r"[a-z0-9]+(?:[._/-][a-z0-9]+)*(?::[\w.-]{1,128})?", re.ASCII)
"""The form of most images; the complete rule is thirty times slower."""


def check_usable(task: Task) -> None:
    """Raise TaskError if the id, the image or the prompt is unusable on every machine."""
    for name in (task.id, task.repo):
        if not name.isprintable():
            raise TaskError(f"the name {name!r:.100} has a control character")
    if len(task.id.encode("utf-8", "replace")) > _MAX_ID_BYTES:
        raise TaskError(f"the id {task.id!r:.40}… has over {_MAX_ID_BYTES} bytes")
    if "\0" in task.prompt:
        raise TaskError("the prompt has a NUL character, which no program accepts")
    if _PLAIN_IMAGE.fullmatch(task.image) or is_local(task.image):
        return
    try:
        parse(task.image)
    except InputError as error:
        raise TaskError(f"its image {error}") from error
