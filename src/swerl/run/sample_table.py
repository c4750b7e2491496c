"""Samples as Arrow tables: the columns of docs/samples.md, to and from arrays without copies.

Routed experts are by far the largest column, so rows that are read bring them only when they are
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from swerl.errors import RunError
from swerl.run.arrays import list_array, row_arrays
from swerl.run.files import disk_errors
from swerl.sample import Sample
from swerl.turn import RoutedExperts

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_GROUP_BYTES = 1 << 25
"""Most bytes of a row group; a longer row is a group of its own."""
_TOKEN_BYTES = 9
"""Of one token in a file: its id, its mask, its log-probability."""
_ROUTED = "routed"
_CODES = {"ids": "i", "mask": "b", "logprobs": "f"}
_COMPRESSED = {f"{name}.list.element": "zstd" for name in _CODES}
"""Routed experts are numbers without a pattern: compressing them takes time and gives nothing."""


def schema() -> pa.Schema:
    """Return the columns of a file of Samples."""
    import pyarrow as pa

    numbers = ("start", "num_layers", "top_k", "bytes_per_id")
    piece = pa.struct([*((name, pa.int32()) for name in numbers), ("data", pa.binary())])
    return pa.schema(
        [
            ("episode", pa.string()),
            ("task", pa.string()),
            ("ids", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
            ("advantage", pa.float64()),
            ("share", pa.float64()),
            ("weight", pa.float64()),
            ("versions", pa.list_(pa.string())),
            (_ROUTED, pa.list_(piece)),
        ]
    )


def write(
    path: Path,
    samples: Sequence[Sample],
    weights: Sequence[float],
    metadata: dict[str, str],
) -> None:
    """Write Samples and their weights, whole or not at all. Raises RunError."""
    import pyarrow.parquet as pq

    columns = schema().with_metadata(metadata)
    temporary = path.with_suffix(".part")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(
            temporary,
            columns,
            compression=_COMPRESSED,
            use_dictionary=["episode", "task"],
            write_statistics=False,
            data_page_size=_GROUP_BYTES,
        ) as writer:
            for places in _groups(samples):
                group = [samples[place] for place in places]
                writer.write_table(_table(group, [weights[place] for place in places], columns))
        temporary.replace(path)


def read(path: Path, *, routed: bool = True) -> Iterator[Sample]:
    """Yield the Samples of a file, a row group at a time; `routed` with their experts.

    Raises RunError where it is damaged.
    """
    with _opened(path) as file:
        for number in range(file.num_row_groups):
            rows = list(_samples(file, path, number))
            yield from rows if routed else (replace(row, routed=()) for row in rows)


def metadata(path: Path) -> dict[str, str]:
    """Return what a file says of itself. Raises RunError where it is damaged."""
    with _opened(path) as file:
        found = file.schema_arrow.metadata or {}
    return {key.decode(): value.decode() for key, value in found.items()}


class StoredExperts(Sequence[RoutedExperts]):
    """The routed experts of one row of a file: read when they are looked at, never kept."""

    def __init__(self, path: Path, group: int, row: int, num_pieces: int) -> None:
        self._path = path
        self._group = group
        self._row = row
        self._num_pieces = num_pieces

    def __len__(self) -> int:
        return self._num_pieces

    def __iter__(self) -> Iterator[RoutedExperts]:
        return iter(self._load())

    @overload
    def __getitem__(self, index: int) -> RoutedExperts: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RoutedExperts]: ...
    def __getitem__(self, index: int | slice) -> RoutedExperts | Sequence[RoutedExperts]:
        return self._load()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self._path, self._group, self._row))

    def _load(self) -> tuple[RoutedExperts, ...]:
        with _opened(self._path) as file:
            column = file.read_row_group(self._group, columns=[_ROUTED]).column(_ROUTED)
            return tuple(RoutedExperts(**piece) for piece in column[self._row].as_py())


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file, and say whatever Arrow finds wrong in it as one RunError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        message = f"cannot read the samples {path}: {error!r}"
        raise RunError(message, hint="delete it; the same command builds its step again") from error


def _groups(samples: Sequence[Sample]) -> Iterator[range]:
    """Yield the rows of each row group."""
    start, num_bytes = 0, 0
    for place, sample in enumerate(samples):
        size = _TOKEN_BYTES * len(sample.ids) + sum(len(piece.data) for piece in sample.routed)
        if place > start and num_bytes + size > _GROUP_BYTES:
            yield range(start, place)
            start, num_bytes = place, 0
        num_bytes += size
    if samples:
        yield range(start, len(samples))


def _table(samples: Sequence[Sample], weights: Sequence[float], columns: pa.Schema) -> pa.Table:
    import pyarrow as pa

    plain = {
        "episode": [sample.episode for sample in samples],
        "task": [sample.task for sample in samples],
        "advantage": [sample.advantage for sample in samples],
        "share": [sample.share for sample in samples],
        "weight": weights,
        "versions": [sample.weight_versions for sample in samples],
        _ROUTED: [list(map(asdict, sample.routed)) for sample in samples],
    }
    arrays = {name: pa.array(values, columns.field(name).type) for name, values in plain.items()}
    for name, code in _CODES.items():
        arrays[name] = list_array([getattr(sample, name) for sample in samples], code)
    return pa.table([arrays[name] for name in columns.names], columns)


def _samples(file: pq.ParquetFile, path: Path, group: int) -> Iterator[Sample]:
    """Yield the rows of a row group."""
    names = [name for name in file.schema_arrow.names if name != _ROUTED]
    table = file.read_row_group(group, columns=[*names, f"{_ROUTED}.list.element.start"])
    numbers = {name: list(row_arrays(table.column(name), code)) for name, code in _CODES.items()}
    num_pieces = table.column(_ROUTED).combine_chunks().value_lengths().to_pylist()
    plain = table.select(["episode", "task", "advantage", "share", "versions"]).to_pylist()
    for row, values in enumerate(plain):
        versions = tuple(values.pop("versions"))
        stored = StoredExperts(path, group, row, num_pieces[row]) if num_pieces[row] else ()
        yield Sample(
            **values,
            ids=numbers["ids"][row],
            mask=numbers["mask"][row],
            logprobs=numbers["logprobs"][row],
            weight_versions=versions,
            routed=stored,
        )
