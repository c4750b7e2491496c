"""Write and read pieces of tensors in torch's distributed checkpoint format.

A checkpoint names every tensor by the whole model and cuts it into boxes. A rank's part of a
parameter follows from the parallel layout. Its part of the optimizer's state is a flat range of
that (ZeRO), which falls into a few boxes. So each rank writes its part without asking another, and
any other layout finds what it needs by overlap.

Megatron-Core's `dist_checkpointing` can read the folder (format `torch_dist`). Its writer is not
used: it starts a server that outlives a killed rank, and forks a process per file whose death makes
the save wait for ever. Here a rank writes one file in the calling thread.
"""

# heavy imports: this file only runs in the trainer's own processes and in exports

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from swerl.core.errors import TrainerError
from swerl.core.files import disk_errors
from swerl.training.checkpoint.folder import OLDER, FileMark, mark

COMMON = "common.pt"
"""State that is small or the same on all ranks: schedule, Adam's steps, random states."""
DESCRIPTIONS = (COMMON, "metadata.json", ".metadata")
"""Files that the first rank adds."""

_MEGATRON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor, and this rank's memory of it."""

    key: str
    """Name of the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Start of the box in the whole tensor."""
    data: torch.Tensor
    """A view of the live tensor, of the box's shape."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's share of one dimension of a parameter."""

    dim: int
    rank: int
    num_ranks: int
    num_stacked: int = 1
    """Matrices stacked along the dimension; each is cut by itself."""


@dataclass(frozen=True, slots=True)
class Written:
    """One rank's file, as the first rank needs it to describe the whole."""

    plan: SavePlan
    results: Sequence[WriteResult]
    files: Mapping[str, FileMark]


def copy_to_host(pieces: Iterable[Piece]) -> list[Piece]:
    """Copy pieces to host memory, which training does not change."""
    return [
        # `copy`: on a CPU, `to` alone would return the live tensor.
        replace(piece, data=piece.data.detach().to("cpu", copy=True).contiguous())
        for piece in pieces
    ]


def write(pieces: Sequence[Piece], folder: Path, rank: int) -> Written:
    """Write and sync one rank's pieces as one file. Raises OSError and torch's errors."""
    by_index = {_index(piece): piece.data for piece in pieces}
    prefix = f"__{rank}_"
    plan = SavePlan([_write_item(piece) for piece in pieces], storage_data=_StoragePrefix(prefix))
    # The pieces are in host memory already, so nothing needs to be copied ahead.
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.lookup_object = by_index.__getitem__  # type: ignore[method-assign,assignment]
    results = writer.write_data(plan, planner).wait() if pieces else []
    files = {path.name: mark(path) for path in folder.glob(f"{prefix}*")}
    return Written(replace(plan, storage_data=None), results, files)


def finish(
    parts: Sequence[Written], common: Mapping[str, Any], folder: Path
) -> dict[str, tuple[int, ...]]:
    """Write the metadata of all parts; return the shapes of all tensors.

    Raises ValueError if the parts do not make up whole tensors.
    """
    plans = [part.plan for part in parts]
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    FileSystemWriter(folder, sync_files=True).finish(
        metadata, [list(part.results) for part in parts]
    )
    torch.save(dict(common), folder / COMMON)
    # Megatron-Core recognizes the format of a folder by this file.
    (folder / "metadata.json").write_text(json.dumps(_MEGATRON))
    return _shapes(metadata)


class CheckpointReader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
            raise _unreadable(folder, error) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return _shapes(self._metadata)

    def check(self, pieces: Sequence[Piece]) -> None:
        """Raise TrainerError if a tensor is missing or has another shape."""
        for piece in pieces:
            self._entry(piece)

    def common(self) -> dict[str, Any]:
        try:
            # A checkpoint may come from elsewhere: execute no pickled code.
            state: dict[str, Any] = torch.load(self.folder / COMMON, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise _unreadable(self.folder, error) from error
        return state

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill the memory of pieces. Raises TrainerError if a tensor does not match."""
        items: list[ReadItem] = []
        for number, piece in enumerate(pieces):
            # The reader finds by overlap which stored boxes contain parts of this one.
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.data.shape)
            read_items = create_read_items_for_chunk_list(piece.key, self._entry(piece), [chunk])
            # Two pieces may be the same part of a tensor: a parameter and its master.
            items += [replace(item, dest_index=MetadataIndex(str(number))) for item in read_items]
        targets = {MetadataIndex(str(n)): piece.data for n, piece in enumerate(pieces)}
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.lookup_tensor = targets.__getitem__  # type: ignore[method-assign,assignment]
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except (OSError, EOFError, RuntimeError, AssertionError, pickle.UnpicklingError) as error:
            raise _unreadable(self.folder, error) from error

    def tensor(self, key: str) -> torch.Tensor:
        """Return a whole tensor on the CPU, in fp32."""
        shape = self.shapes[key]
        whole = torch.empty(shape)
        self.read([Piece(key, shape, (0,) * len(shape), whole)])
        return whole

    def _entry(self, piece: Piece) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(piece.key)
        size = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if size == piece.shape:
            assert isinstance(entry, TensorStorageMetadata)
            return entry
        has = "no such tensor" if size is None else f"shape {size}"
        message = f"the model has {piece.key} {piece.shape}, the checkpoint {self.folder} {has}"
        hint = "restore with the model that the checkpoint was made from"
        raise TrainerError(message, hint=hint)


def _shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    return {
        key: tuple(entry.size)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def sync_folder(folder: Path) -> None:
    """Sync a folder and its files, so that they survive a power cut."""
    with disk_errors(folder):
        # The files come before the folder that names them.
        for path in [*(p for p in folder.iterdir() if p.is_file()), folder]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, torch.Size(piece.offsets))


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), piece.data.shape)
    properties = TensorProperties(dtype=piece.data.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(piece.shape))
    return WriteItem(_index(piece), WriteItemType.SHARD, tensor_data=data)


def _unreadable(folder: Path, error: BaseException) -> TrainerError:
    line = (str(error) or repr(error)).splitlines()[0]
    message = f"cannot restore the checkpoint {folder}: {line}"
    return TrainerError(message, hint=OLDER)


def pieces(
    key: str,
    local: torch.Tensor,
    local_shape: Sequence[int],
    cuts: Sequence[Cut],
    *,
    start: int = 0,
) -> Iterator[Piece]:
    """Cut this rank's memory of a tensor into boxes of the whole tensor.

    This rank's part has `local_shape`. `local` holds its elements from `start` on: all or a range.
    """
    by_dim = {cut.dim: cut for cut in cuts}
    whole = [Cut(dim, 0, 1) for dim in range(len(local_shape))]
    shares = [by_dim.get(cut.dim, cut) for cut in whole]
    widths = [size // share.num_stacked for size, share in zip(local_shape, shares, strict=True)]
    # Each dimension becomes two: the number of the stacked matrix, and the index in it.
    layered = [
        n for share, width in zip(shares, widths, strict=True) for n in (share.num_stacked, width)
    ]
    shape = tuple(size * share.num_ranks for size, share in zip(local_shape, shares, strict=True))
    # A view: reading a checkpoint fills the live tensor through it.
    flat = local.detach().reshape(-1)
    for box in _boxes(start, start + flat.numel(), layered):
        begin = box.begin - start
        view = flat[begin : begin + math.prod(box.sizes)].view(box.sizes)
        # Stacked matrices lie apart in the whole tensor, so each becomes a piece of its own.
        for stacked in product(*(range(size) for size in box.sizes[::2])):
            index = tuple(part for number in stacked for part in (number, slice(None)))
            # This rank's share of stacked matrix s starts at (s * ranks + rank) * width.
            offsets = tuple(
                ((box.offsets[2 * dim] + stacked[dim]) * share.num_ranks + share.rank) * width
                + box.offsets[2 * dim + 1]
                for dim, (share, width) in enumerate(zip(shares, widths, strict=True))
            )
            yield Piece(key, shape, offsets, view[index])


@dataclass(frozen=True, slots=True)
class _Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """Row-major index of its first element."""


def _boxes(start: int, end: int, shape: Sequence[int], begin: int = 0) -> Iterator[_Box]:
    """Cut the elements `start` to `end` of an array, in row-major order, into boxes."""
    if start >= end:
        return
    if not shape:
        yield _Box((), (), begin)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from _in_row(last, start, end, shape, begin)
        return
    # The range is the end of a row, then whole rows, then the start of a row.
    yield from _in_row(first - 1, start, first * row, shape, begin)
    if first < last:
        offsets = (first, *(0 for _ in shape[1:]))
        yield _Box(offsets, (last - first, *shape[1:]), begin + first * row)
    yield from _in_row(last, last * row, end, shape, begin)


def _in_row(number: int, start: int, end: int, shape: Sequence[int], begin: int) -> Iterator[_Box]:
    row = math.prod(shape[1:])
    at = number * row
    for box in _boxes(start - at, end - at, shape[1:], begin + at):
        yield _Box((number, *box.offsets), (1, *box.sizes), box.begin)
