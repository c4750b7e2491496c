"""Turns and Samples as Parquet files; docs/reference/samples.md lists the columns.

Numbers go to and from Arrow without a Python object each. Recorded experts stay in files of their
own; a row of Samples stores the location of its experts, relative to its own folder.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerl.core import experts
from swerl.core.episode import Episode
from swerl.core.errors import RunError
from swerl.core.files import replacing
from swerl.core.sample import Sample
from swerl.core.turn import RoutedExperts, StoredBytes, Turn

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_TURN_NUMBERS = {"prompt_ids": "i", "output_ids": "i", "logprobs": "d"}
_TURN_NAMES = ("episode", "task", "agent", "verdict", "finish", "weight_version")
_SAMPLE_NUMBERS = {"ids": "i", "mask": "b", "logprobs": "f"}
_GROUP_BYTES = 1 << 25
"""Largest row group in bytes; a longer row is a group of its own."""
_TOKEN_BYTES = 9
"""Bytes of one token in a file: its id, its mask, its log-probability."""
_ROUTED = "routed"
_SHAPE = ("start", "num_layers", "top_k", "bytes_per_id")
_LOCATION = ("offset", "num_bytes", "checksum")


def write_turns(path: Path, episodes: Iterable[Episode]) -> None:
    """Write every Turn of these Episodes, one row each, atomically. Raises RunError.

    Columns: episode, task, agent, verdict, reward, index, parent (null for a root), prompt_ids,
    output_ids, logprobs, finish, weight_version, weight_changes, started_s, duration_s,
    malformed_calls, num_routed (positions with recorded experts; Samples hold the experts).
    """
    import pyarrow.parquet as pq

    turns = [(episode, turn) for episode in episodes for turn in episode.trajectory.turns]
    with replacing(path) as temporary:
        table, names = _turn_table(turns), list(_TURN_NAMES)
        pq.write_table(table, temporary, compression="zstd", use_dictionary=names)


def _turn_table(turns: list[tuple[Episode, Turn]]) -> pa.Table:
    import pyarrow as pa

    rows = [
        {
            "episode": episode.id,
            "task": episode.task_id,
            "agent": episode.agent,
            "verdict": str(episode.verdict),
            "reward": episode.reward,
            "index": turn.index,
            "parent": turn.parent,
            "finish": str(turn.finish),
            "weight_version": turn.weight_version,
            "weight_changes": [asdict(change) for change in turn.weight_changes],
            "started_s": turn.started_s,
            "duration_s": turn.duration_s,
            "malformed_calls": turn.malformed_calls,
            "num_routed": turn.routed.num_positions if turn.routed else 0,
        }
        for episode, turn in turns
    ]
    change = pa.struct([("at", pa.int32()), ("version", pa.string())])
    columns = pa.schema(
        [
            *((name, pa.string()) for name in _TURN_NAMES),
            *((name, pa.float64()) for name in ("reward", "started_s", "duration_s")),
            *((name, pa.int32()) for name in ("index", "parent", "malformed_calls", "num_routed")),
            ("weight_changes", pa.list_(change)),
        ]
    )
    table = pa.Table.from_pylist(rows, columns)
    # Numbers become arrays without a Python object for each.
    for name, code in _TURN_NUMBERS.items():
        table = table.append_column(name, _list_array([getattr(t, name) for _, t in turns], code))
    return table


def read_turns(path: Path, at_once: int = 64) -> Iterator[dict[str, Any]]:
    """Yield each row of a file of Turns, some rows at a time. Raises RunError on a damaged file."""
    import pyarrow as pa

    with _opened(path) as file:
        names = [name for name in file.schema_arrow.names if name not in _TURN_NUMBERS]
        for batch in file.iter_batches(at_once):
            table = pa.Table.from_batches([batch])
            numbers = {
                name: list(_row_arrays(table.column(name), code))
                for name, code in _TURN_NUMBERS.items()
            }
            for row, values in enumerate(table.select(names).to_pylist()):
                yield values | {name: rows[row] for name, rows in numbers.items()}


def sample_schema() -> pa.Schema:
    """Return the columns of a file of Samples."""
    import pyarrow as pa

    return pa.schema(
        [
            ("episode", pa.string()),
            ("task", pa.string()),
            ("agent", pa.string()),
            ("ids", pa.list_(pa.int32())),
            ("mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
            ("advantage", pa.float64()),
            ("share", pa.float64()),
            ("weight", pa.float64()),
            ("versions", pa.list_(pa.string())),
            (_ROUTED, _expert_type()),
        ]
    )


def write_samples(
    path: Path,
    samples: Sequence[Sample],
    weights: Sequence[float],
    metadata: dict[str, str],
) -> None:
    """Write Samples and their weights, atomically. Raises RunError.

    Experts still in memory are first written to a file beside this one.
    """
    import pyarrow.parquet as pq

    columns = sample_schema().with_metadata(metadata)
    samples = _with_stored_experts(path.with_suffix(".experts"), samples)
    with replacing(path) as temporary:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(
            temporary,
            columns,
            compression="zstd",
            use_dictionary=["episode", "task", "agent", f"{_ROUTED}.list.element.file"],
            write_statistics=False,
            data_page_size=_GROUP_BYTES,
        ) as writer:
            for rows in _row_groups([_TOKEN_BYTES * len(sample.ids) for sample in samples]):
                group = [samples[row] for row in rows]
                table = _sample_table(group, [weights[row] for row in rows], columns, path.parent)
                writer.write_table(table)


def read_samples(path: Path, *, routed: bool = True) -> Iterator[Sample]:
    """Yield the Samples of a file, one row group at a time; `routed` adds the location of experts.

    Raises RunError on a damaged file.
    """
    with _opened(path) as file:
        for number in range(file.num_row_groups):
            yield from list(_read_group(file, number, path.parent, routed=routed))


def write_logprobs(path: Path, rows: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Write each Sample's Episode and the trainer's log-probabilities of its trained tokens.

    Samples of one Episode keep their order. Raises RunError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = pa.schema([("episode", pa.string()), ("logprobs", pa.list_(pa.float32()))])
    with replacing(path) as temporary:
        path.parent.mkdir(exist_ok=True)
        with pq.ParquetWriter(temporary, columns, compression="zstd") as writer:
            for numbers in _row_groups([4 * len(values) for _, values in rows]):
                group = [rows[number] for number in numbers]
                values = _list_array([values for _, values in group], "f")
                writer.write_table(pa.table([[name for name, _ in group], values], columns))


def read_logprobs(path: Path, episode: str) -> list[array[float]]:
    """Return the trainer's log-probabilities of each Sample of an Episode. Raises RunError."""
    values: list[array[float]] = []
    with _opened(path) as file:
        for group in range(file.num_row_groups):
            names = file.read_row_group(group, columns=["episode"]).column("episode").to_pylist()
            if episode in names:
                rows = _row_arrays(file.read_row_group(group).column("logprobs"), "f")
                values += [row for name, row in zip(names, rows, strict=True) if name == episode]
    return values


def read_metadata(path: Path) -> dict[str, str]:
    """Return a file's own metadata. Raises RunError on a damaged file."""
    with _opened(path) as file:
        metadata = file.schema_arrow.metadata or {}
    return {key.decode(): value.decode() for key, value in metadata.items()}


@dataclass(frozen=True, slots=True)
class TrainedEpisode:
    """The use that a Batch made of one Episode."""

    advantage: float
    num_rows: int
    num_trained: int
    """Tokens in the loss."""


def read_trained(path: Path, episode: str | None = None) -> dict[str, TrainedEpisode]:
    """Return id -> use of each Episode of a file, or of one; ids of tokens are not read.

    Without `episode`, masks are not read either and `num_trained` is 0. Raises RunError.
    """
    import pyarrow.compute as pc

    uses: dict[str, TrainedEpisode] = {}
    with _opened(path) as file:
        names = ["episode", "advantage", *(["mask"] if episode else ())]
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=names)
            if episode:
                table = table.filter(pc.equal(table.column("episode"), episode))
            uses_of_rows = table.select(names[:2]).to_pylist()
            masks = table.column("mask").to_pylist() if episode else repeat(())
            for row, mask in zip(uses_of_rows, masks, strict=False):
                old = uses.get(row["episode"], TrainedEpisode(row["advantage"], 0, 0))
                num_trained = old.num_trained + sum(mask)
                use = TrainedEpisode(row["advantage"], old.num_rows + 1, num_trained)
                uses[row["episode"]] = use
    return uses


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a file; every error that Arrow raises inside the block becomes a RunError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"cannot read the samples {path}: {error!r}",
            hint="restore this file from a copy; the other steps are not affected",
        ) from error


def _row_groups(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the row numbers of each row group; `sizes` are the bytes of the rows."""
    start, num_bytes = 0, 0
    for row, size in enumerate(sizes):
        if row > start and num_bytes + size > _GROUP_BYTES:
            yield range(start, row)
            start, num_bytes = row, 0
        num_bytes += size
    if sizes:
        yield range(start, len(sizes))


def _sample_table(
    samples: Sequence[Sample], weights: Sequence[float], columns: pa.Schema, folder: Path
) -> pa.Table:
    import pyarrow as pa

    lists = {
        "episode": [sample.episode for sample in samples],
        "task": [sample.task for sample in samples],
        "agent": [sample.agent for sample in samples],
        "advantage": [sample.advantage for sample in samples],
        "share": [sample.share for sample in samples],
        "weight": weights,
        "versions": [sample.weight_versions for sample in samples],
    }
    arrays = {name: pa.array(values, columns.field(name).type) for name, values in lists.items()}
    arrays[_ROUTED] = _expert_column([sample.routed for sample in samples], folder)
    for name, code in _SAMPLE_NUMBERS.items():
        arrays[name] = _list_array([getattr(sample, name) for sample in samples], code)
    return pa.table([arrays[name] for name in columns.names], columns)


def _read_group(
    file: pq.ParquetFile, group: int, folder: Path, *, routed: bool
) -> Iterator[Sample]:
    # One column at a time: they are the largest part of a run's memory.
    numbers = {
        name: list(_row_arrays(file.read_row_group(group, columns=[name]).column(name), code))
        for name, code in _SAMPLE_NUMBERS.items()
    }
    names = [name for name in file.schema_arrow.names if name not in _SAMPLE_NUMBERS]
    table = file.read_row_group(group, columns=[n for n in names if routed or n != _ROUTED])
    experts = _read_experts(table.column(_ROUTED), folder) if routed else repeat(())
    plain_names = ["episode", "task", "agent", "advantage", "share", "versions"]
    rows = table.select(plain_names).to_pylist()
    for row, (values, pieces) in enumerate(zip(rows, experts, strict=False)):
        versions = tuple(values.pop("versions"))
        yield Sample(
            **values,
            ids=numbers["ids"][row],
            mask=numbers["mask"][row],
            logprobs=numbers["logprobs"][row],
            weight_versions=versions,
            routed=pieces,
        )


def _expert_type() -> pa.DataType:
    import pyarrow as pa

    shape = ((name, pa.int32()) for name in _SHAPE)
    location = ((name, pa.int64()) for name in _LOCATION)
    return pa.list_(pa.struct([*shape, *location, ("file", pa.string())]))


def _with_stored_experts(path: Path, samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return Samples whose experts all lie in files; those in memory are written to `path`.

    Samples may share a record, which is written once. Raises RunError.
    """
    in_memory = {
        id(piece): piece
        for sample in samples
        for piece in sample.routed
        if not isinstance(piece.data, StoredBytes)
    }
    if not in_memory:
        return samples
    moved = dict(zip(in_memory, experts.store(path, list(in_memory.values())), strict=True))
    return [
        replace(sample, routed=tuple(moved.get(id(piece), piece) for piece in sample.routed))
        for sample in samples
    ]


def _expert_column(rows: Sequence[Sequence[RoutedExperts]], folder: Path) -> pa.ListArray:
    import pyarrow as pa

    pieces = list(chain.from_iterable(rows))
    stored = [piece.data for piece in pieces if isinstance(piece.data, StoredBytes)]
    assert len(stored) == len(pieces)
    # Relative paths stay valid if the run folder is moved.
    names = {file: os.path.relpath(file, folder) for file in {record.file for record in stored}}
    fields = list(_expert_type().value_type)
    values = [[getattr(piece, name) for piece in pieces] for name in _SHAPE]
    values += [[getattr(record, name) for record in stored] for name in _LOCATION]
    values.append([names[record.file] for record in stored])
    arrays = [pa.array(record, field.type) for record, field in zip(values, fields, strict=True)]
    ends = pa.array(accumulate(map(len, rows), initial=0), pa.int32())
    return pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays(arrays, fields=fields))


def _read_experts(column: pa.ChunkedArray, folder: Path) -> Iterator[tuple[RoutedExperts, ...]]:
    """Yield the records of each row."""
    whole = column.combine_chunks()
    fields = [field.to_pylist() for field in whole.flatten().flatten()]
    shapes = zip(*fields[: len(_SHAPE)], strict=True)
    locations = fields[len(_SHAPE) : -1]
    files = {name: folder / name for name in set(fields[-1])}
    data = [
        StoredBytes(files[file], *location)
        for file, *location in zip(fields[-1], *locations, strict=True)
    ]
    pieces = iter(
        RoutedExperts(start, num_layers, top_k, bytes_per_id, stored)
        for (start, num_layers, top_k, bytes_per_id), stored in zip(shapes, data, strict=True)
    )
    for length in whole.value_lengths().to_pylist():
        yield tuple(islice(pieces, length))


def _list_array(rows: Sequence[Sequence[float]], code: str) -> pa.ListArray:
    """Return rows of numbers as one list array; `code` is their type code in module `array`."""
    import numpy as np
    import pyarrow as pa

    arrays = [row if isinstance(row, array) else array(code, row) for row in rows]
    values = (
        np.concatenate([np.asarray(row, code) for row in arrays]) if arrays else np.empty(0, code)
    )
    # Row n has the values from end n to end n + 1.
    ends = np.fromiter(accumulate(map(len, arrays), initial=0), "i")
    return pa.ListArray.from_arrays(ends, pa.array(values))


def _row_arrays(column: pa.ChunkedArray, code: str) -> Iterator[array[Any]]:
    whole = column.combine_chunks()
    values = memoryview(whole.flatten().to_numpy()).cast("B")
    size = array(code).itemsize
    start = 0
    for length in whole.value_lengths().to_pylist():
        row = array(code)
        row.frombytes(values[start * size : (start + length) * size])
        start += length
        yield row
