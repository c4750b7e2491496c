"""Rows of numbers as Arrow's list arrays and back, without a Python object a number."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def list_array(rows: Sequence[Sequence[float]], code: str) -> pa.ListArray:
    """Return rows of numbers as one list array; `code` is their type by the module `array`."""
    import numpy as np
    import pyarrow as pa

    held = [row if isinstance(row, array) else array(code, row) for row in rows]
    values = np.concatenate([np.asarray(row, code) for row in held]) if held else np.empty(0, code)
    ends = np.fromiter(accumulate(map(len, held), initial=0), "i")
    return pa.ListArray.from_arrays(ends, pa.array(values))


def row_arrays(column: pa.ChunkedArray, code: str) -> Iterator[array[Any]]:
    """Yield the numbers of each row of a list array."""
    whole = column.combine_chunks()
    values = memoryview(whole.flatten().to_numpy()).cast("B")
    size = array(code).itemsize
    start = 0
    for length in whole.value_lengths().to_pylist():
        row = array(code)
        row.frombytes(values[start * size : (start + length) * size])
        start += length
        yield row
