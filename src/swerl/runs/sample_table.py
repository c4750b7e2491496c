"""Samples as Arrow tables: columns of docs/reference/samples.md, to and from arrays.

Routed experts lie in the files of their Episodes, and a row says where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core.errors import RunError
from swerl.core.files import disk_errors
from swerl.core.sample import Sample
from swerl.runs import expert_column
from swerl.runs.arrays import list_array, row_arrays

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_GROUP_BYTES = 1 << 25
"""Most bytes of a row group; a longer row is a group of its own."""
_TOKEN_BYTES = 9
"""Of one token in a file: its id, its mask, its log-probability."""
_ROUTED = "routed"
_CODES = {"ids": "i", "mask": "b", "logprobs": "f"}


def schema() -> pa.Schema:
    """Return the columns of a file of Samples."""
    import pyarrow as pa

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
            (_ROUTED, expert_column.kind()),
        ]
    )


def write(
    path: Path,
    samples: Sequence[Sample],
    weights: Sequence[float],
    metadata: dict[str, str],
) -> None:
    """Write Samples and their weights, whole or not at all. Raises RunError.

    Experts that lie in no file yet get one beside this one, before it.
    """
    import pyarrow.parquet as pq

    columns = schema().with_metadata(metadata)
    samples = expert_column.stored(path.with_suffix(".experts"), samples)
    temporary = path.with_suffix(".part")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(
            temporary,
            columns,
            compression="zstd",
            use_dictionary=["episode", "task", f"{_ROUTED}.list.element.file"],
            write_statistics=False,
            data_page_size=_GROUP_BYTES,
        ) as writer:
            for places in _groups(samples):
                group = [samples[place] for place in places]
                table = _table(group, [weights[place] for place in places], columns, path.parent)
                writer.write_table(table)
        temporary.replace(path)


def read(path: Path, *, routed: bool = True) -> Iterator[Sample]:
    """Yield the Samples of a file, a row group at a time; `routed` with where their experts lie.

    Raises RunError where it is damaged.
    """
    with _opened(path) as file:
        for number in range(file.num_row_groups):
            yield from list(_samples(file, number, path.parent, routed=routed))


def metadata(path: Path) -> dict[str, str]:
    """Return what a file says of itself. Raises RunError where it is damaged."""
    with _opened(path) as file:
        found = file.schema_arrow.metadata or {}
    return {key.decode(): value.decode() for key, value in found.items()}


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file, and say whatever Arrow finds wrong in it as one RunError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot read the samples {path}: {error!r}",
            hint="delete it; the same command builds its step again",
        ) from error


def _groups(samples: Sequence[Sample]) -> Iterator[range]:
    """Yield the rows of each row group."""
    start, num_bytes = 0, 0
    for place, sample in enumerate(samples):
        size = _TOKEN_BYTES * len(sample.ids)
        if place > start and num_bytes + size > _GROUP_BYTES:
            yield range(start, place)
            start, num_bytes = place, 0
        num_bytes += size
    if samples:
        yield range(start, len(samples))


def _table(
    samples: Sequence[Sample], weights: Sequence[float], columns: pa.Schema, folder: Path
) -> pa.Table:
    import pyarrow as pa

    plain = {
        "episode": [sample.episode for sample in samples],
        "task": [sample.task for sample in samples],
        "advantage": [sample.advantage for sample in samples],
        "share": [sample.share for sample in samples],
        "weight": weights,
        "versions": [sample.weight_versions for sample in samples],
    }
    arrays = {name: pa.array(values, columns.field(name).type) for name, values in plain.items()}
    arrays[_ROUTED] = expert_column.column([sample.routed for sample in samples], folder)
    for name, code in _CODES.items():
        arrays[name] = list_array([getattr(sample, name) for sample in samples], code)
    return pa.table([arrays[name] for name in columns.names], columns)


def _samples(file: pq.ParquetFile, group: int, folder: Path, *, routed: bool) -> Iterator[Sample]:
    """Yield the rows of a row group."""
    names = [name for name in file.schema_arrow.names if routed or name != _ROUTED]
    table = file.read_row_group(group, columns=names)
    numbers = {name: list(row_arrays(table.column(name), code)) for name, code in _CODES.items()}
    experts = expert_column.rows(table.column(_ROUTED), folder) if routed else repeat(())
    plain = table.select(["episode", "task", "advantage", "share", "versions"]).to_pylist()
    for row, (values, pieces) in enumerate(zip(plain, experts, strict=False)):
        versions = tuple(values.pop("versions"))
        yield Sample(
            **values,
            ids=numbers["ids"][row],
            mask=numbers["mask"][row],
            logprobs=numbers["logprobs"][row],
            weight_versions=versions,
            routed=pieces,
        )
