"""Model folders on disk: find their safetensors files, and compute a checksum of their tensors.

The checksum depends on names, types, shapes and bytes of the tensors, not on their files or order.
Only the standard library is needed, so trainers and engines use the same code.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from swerl.core.errors import EngineError
from swerl.core.files import read_json
from swerl.engines._sglang_wire import ServedShape

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys for the number of routed experts, by model line."""


def checksum(folder: Path) -> str:
    """Return the checksum of every tensor in the folder, without reading a file into memory.

    Raises EngineError on unreadable files.
    """
    digests: dict[str, bytes] = {}
    for path in shards(folder):
        with path.open("rb") as file:
            if not path.stat().st_size:
                _tensors(b"")
            # Closed with its last view; an explicit close fails while a view exists.
            blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            digests |= dict(_digests(blob))
    return combine(digests)


def shards(folder: Path) -> list[Path]:
    """Return a model's safetensors files: those of a whole index, or all. Raises EngineError."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():  # engines read no other files, which may hold older tensors
        named = {folder / name for name in read_json(index)["weight_map"].values()}
        files = sorted(named) if named.issubset(files) else files
    if not files:
        hint = "name a model folder in Hugging Face format: config.json, model.safetensors"
        raise EngineError(f"no *.safetensors in {str(folder)!r}", hint=hint)
    return files


def model_shape(folder: Path) -> ServedShape:
    """Return the numbers in the folder's config.json; unknown ones if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        vocab = config.get("vocab_size") or text.get("vocab_size")
        experts = next((text[name] for name in _EXPERTS if text.get(name)), 0)
        return ServedShape(
            num_vocab=None if vocab is None else int(vocab),
            num_layers=int(text.get("num_hidden_layers") or 0),
            top_k_experts=int(text.get("num_experts_per_tok") or 0),
            num_experts=int(experts),
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return ServedShape()


def digest(blobs: Iterable[bytes]) -> str:
    """Return the checksum of a folder whose safetensors files are read already."""
    return combine({name: value for blob in blobs for name, value in _digests(blob)})


def combine(digests: Mapping[str, bytes]) -> str:
    """Return the checksum of a model from those of its tensors, by name."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def tensor_digest(name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> bytes:
    """Return the sha256 of one tensor; `dtype` by safetensors' name."""
    hasher = hashlib.sha256(f"{name}\0{dtype}\0{list(shape)}\n".encode())
    hasher.update(data)
    return hasher.digest()


def _digests(blob: bytes | mmap.mmap) -> Iterator[tuple[str, bytes]]:
    for name, (dtype, shape, data) in _tensors(blob).items():
        yield name, tensor_digest(name, dtype, shape, data)


def _tensors(blob: bytes | mmap.mmap) -> dict[str, tuple[str, list[int], memoryview]]:
    """Read one file: 8 bytes of header length, a JSON header, then the data of all tensors."""
    try:
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        view = memoryview(blob)
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(blob) - start:
                raise ValueError(f"{name} lies outside the file")
            tensors[name] = (entry["dtype"], entry["shape"], view[start + begin : start + end])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"not a readable safetensors file: {error}",
            hint="the file is truncated or of another format; publish the weights again",
        ) from error
    return tensors
