"""Where the experts of rows lie, as a column of structs; files are named from its own folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from swerl.core import experts
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts, StoredBytes

if TYPE_CHECKING:
    import pyarrow as pa

_SHAPE = ("start", "num_layers", "top_k", "bytes_per_id")
_PLACE = ("offset", "num_bytes", "checksum")


def kind() -> pa.DataType:
    """Return the column's type."""
    import pyarrow as pa

    numbers = [*((name, pa.int32()) for name in _SHAPE), *((name, pa.int64()) for name in _PLACE)]
    return pa.list_(pa.struct([*numbers, ("file", pa.string())]))


def stored(path: Path, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return rows whose experts all lie in files; `path` becomes that of those that did not.

    Rows may share a record, which is written once. Raises RunError.
    """
    held = {
        id(piece): piece
        for sample in samples
        for piece in sample.routed
        if not isinstance(piece.data, StoredBytes)
    }
    if not held:
        return samples
    moved = dict(zip(held, experts.store(path, list(held.values())), strict=True))
    return [
        replace(sample, routed=tuple(moved.get(id(piece), piece) for piece in sample.routed))
        for sample in samples
    ]


def column(rows: Sequence[Sequence[RoutedExperts]], folder: Path) -> pa.ListArray:
    """Return the column of these rows, for a file in `folder`."""
    import pyarrow as pa

    pieces = list(chain.from_iterable(rows))
    places = [_place(piece) for piece in pieces]
    names = {file: os.path.relpath(file, folder) for file in {place.file for place in places}}
    fields = list(kind().value_type)
    values = [[getattr(piece, name) for piece in pieces] for name in _SHAPE]
    values += [[getattr(place, name) for place in places] for name in _PLACE]
    values.append([names[place.file] for place in places])
    arrays = [pa.array(each, field.type) for each, field in zip(values, fields, strict=True)]
    ends = pa.array(accumulate(map(len, rows), initial=0), pa.int32())
    return pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays(arrays, fields=fields))


def rows(column: pa.ChunkedArray, folder: Path) -> Iterator[tuple[RoutedExperts, ...]]:
    """Yield the records of each row of a column that was read from a file in `folder`.

    Older files hold the ids themselves.
    """
    whole = column.combine_chunks()
    names = [field.name for field in whole.type.value_type]
    fields = dict(zip(names, (each.to_pylist() for each in whole.flatten().flatten()), strict=True))
    files = {name: folder / name for name in set(fields.get("file", ()))}
    if files:
        places = zip(*(fields[name] for name in ("file", *_PLACE)), strict=True)
        fields["data"] = [StoredBytes(files[file], *place) for file, *place in places]
    columns = (fields.get(name, ()) for name in (*_SHAPE, "data"))
    pieces = iter([RoutedExperts(*values) for values in zip(*columns, strict=True)])
    for length in whole.value_lengths().to_pylist():
        yield tuple(islice(pieces, length))


def _place(piece: RoutedExperts) -> StoredBytes:
    assert isinstance(piece.data, StoredBytes)
    return piece.data
