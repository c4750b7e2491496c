"""Convert a dataset: stream its rows, write a Task or a reject for each, report what happened.

Converters are the modules of the top-level folder `data_converters/` (in a wheel:
`swerl/data_converters`), or modules registered under the entry point group `swerl.converters`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import orjson

import swerl
from swerl.chat import Json
from swerl.errors import InputError, TaskError, unknown
from swerl.task import Task, to_row

Row: TypeAlias = Mapping[str, Json]

_PACKAGE = "swerl.data_converters"
_PARQUET_ROWS = 64
"""Rows held at once from a Parquet file: the largest known rows have one megabyte."""


@dataclass(frozen=True, slots=True)
class Converter:
    """One dataset's converter, found by the name that users type."""

    name: str
    source: str
    """Hub id that is read where no file is given."""
    splits: tuple[str, ...]
    """Splits of the dataset; the first is the default."""
    to_task: Callable[[Row], Task]

    def tasks(self, rows: Iterable[Row]) -> Iterator[Task]:
        """Yield a Task per row. Raises TaskError on a row that cannot be used."""
        return map(self.to_task, rows)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a conversion did."""

    num_tasks: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    """How often each reason made a reject."""

    @property
    def num_rejects(self) -> int:
        """Rows that made no Task."""
        return sum(self.reasons.values())


def find_converter(name: str) -> Converter:
    """Return the converter of this name. Raises UnknownNameError with the nearest names."""
    module_name = name.replace("-", "_")
    if module_name in _built_in() and not module_name.startswith("_"):
        return _converter(name, importlib.import_module(f"{_package().__name__}.{module_name}"))
    for entry in entry_points(group="swerl.converters"):
        if entry.name == name:
            return _converter(name, entry.load())
    raise unknown("dataset", name, converter_names())


def converter_names() -> list[str]:
    """Return every name that `find_converter` answers to."""
    built_in = [name.replace("_", "-") for name in _built_in()]
    return sorted([*built_in, *(entry.name for entry in entry_points(group="swerl.converters"))])


def read_rows(path: Path) -> Iterator[Row | TaskError]:
    """Yield the rows of a JSONL or Parquet file; a line that is no row comes as its error."""
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        with path.open("rb") as lines:
            yield from (_parse(line) for line in lines if line.strip())
    except OSError as error:
        message = f"cannot read rows from {path}: {error.strerror}"
        raise InputError(message, hint="pass --rows with a JSONL or Parquet file") from error


def hub_rows(repo_id: str, split: str) -> Iterator[Row | TaskError]:
    """Stream the rows of a dataset from the hub, without storing it."""
    hint = "check the id, the split and the network, or pass --rows FILE"
    try:
        from datasets import load_dataset
    except ImportError as error:
        message = "reading from the hub needs the package `datasets`"
        hint = "install it with `pip install 'swerl[datasets]'`, or pass --rows FILE"
        raise InputError(message, hint=hint) from error
    try:
        yield from load_dataset(repo_id, split=split, streaming=True)
    except Exception as error:  # three client libraries without a common base class
        message = f"cannot stream {repo_id} ({split}): {error!s:.200}"
        raise InputError(message, hint=hint) from error


def convert(converter: Converter, rows: Iterable[Row | TaskError], out: Path) -> Summary:
    """Write Tasks to `out` and rejects beside it; both appear whole, or not at all.

    Memory is bounded by one row, and by the ids seen.
    """
    rejects = rejects_path(out)
    reasons: Counter[str] = Counter()
    seen: set[str] = set()
    parts = [path.with_name(path.name + ".part") for path in (out, rejects)]
    try:
        with parts[0].open("wb") as tasks_file, parts[1].open("wb") as rejects_file:
            for number, row in enumerate(rows, 1):
                try:
                    tasks_file.write(_line(converter, row, seen))
                except TaskError as error:
                    reasons[str(error)] += 1
                    rejects_file.write(_reject(number, row, error))
    except OSError as error:
        message = f"cannot write {out}: {error.strerror}"
        raise InputError(message, hint="pass -o with a file in a folder that exists") from error
    for part, path in zip(parts, (out, rejects), strict=True):
        part.replace(path)
    return Summary(len(seen), dict(reasons.most_common()))


def rejects_path(out: Path) -> Path:
    """Return the file that holds the rejects of a conversion into `out`."""
    return out.with_name(f"{out.stem}.rejects.jsonl")


def _line(converter: Converter, row: Row | TaskError, seen: set[str]) -> bytes:
    if isinstance(row, TaskError):
        raise row
    task = converter.to_task(row)
    if task.id in seen:
        raise TaskError("another row has the same id")
    try:
        line = orjson.dumps(to_row(task), option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        message = "a column holds text that is not valid Unicode"
        raise TaskError(message) from error
    seen.add(task.id)
    return line


def _reject(number: int, row: Row | TaskError, error: TaskError) -> bytes:
    name = "" if isinstance(row, TaskError) else str(row.get("instance_id") or "")
    entry = {"row": number, "id": name.encode("utf-8", "replace").decode(), "reason": str(error)}
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)


def _parse(line: bytes) -> Row | TaskError:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return TaskError(f"the line is no JSON: {error.msg}")
    return row if isinstance(row, dict) else TaskError("the line is no JSON object")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        message = "reading Parquet needs the package `pyarrow`"
        raise InputError(message, hint="install it: `pip install 'swerl[datasets]'`") from error
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_PARQUET_ROWS):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        message = f"cannot read rows from {path}: {error}"
        raise InputError(message, hint="pass --rows with a JSONL or Parquet file") from error


def _converter(name: str, module: ModuleType) -> Converter:
    return Converter(name, module.SOURCE, tuple(module.SPLITS), module.to_task)


def _built_in() -> list[str]:
    return [path.stem for path in _folder().glob("*.py") if not path.stem.startswith("_")]


def _folder() -> Path:
    package = Path(swerl.__file__).parent
    in_wheel = package / "data_converters"
    return in_wheel if in_wheel.is_dir() else package.parents[1] / "data_converters"


def _package() -> ModuleType:
    """Import the folder as `swerl.data_converters`, wherever it stands."""
    if _PACKAGE in sys.modules:
        return sys.modules[_PACKAGE]
    init = _folder() / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, init, submodule_search_locations=[str(init.parent)]
    )
    if spec is None or spec.loader is None:
        raise InputError("the built-in converters are missing", hint="install swerl again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)
    return module
