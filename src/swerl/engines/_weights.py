"""Model folders on disk: find their safetensors files and name their content by a checksum.

The checksum depends on names, types, shapes and bytes of the tensors, not on how they are spread
over files or ordered in them. Only the standard library is needed, so trainers and engines agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from swerl.errors import EngineError


def checksum(folder: Path) -> str:
    """Return the sha256 of every tensor in the folder. Raises EngineError on unreadable files."""
    return digest(path.read_bytes() for path in shards(folder))


def shards(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder. Raises EngineError when it has none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        message = f"no *.safetensors in {str(folder)!r}"
        raise EngineError(
            message,
            hint="name a model folder in Hugging Face format: config.json, model.safetensors",
        )
    return found


def num_vocab(folder: Path) -> int | None:
    """Return the vocabulary size that the folder's config.json states, if it states one."""
    try:
        config = json.loads((folder / "config.json").read_text())
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return int(size)


def digest(blobs: Iterable[bytes]) -> str:
    """Return the checksum of the tensors in whole safetensors files, given as bytes."""
    tensors: dict[str, tuple[bytes, memoryview]] = {}
    for blob in blobs:
        tensors |= _tensors(blob)
    total = hashlib.sha256()
    for name in sorted(tensors):
        label, data = tensors[name]
        total.update(label)
        total.update(data)
    return total.hexdigest()


def _tensors(blob: bytes) -> dict[str, tuple[bytes, memoryview]]:
    """Read one file: 8 bytes of header length, a JSON header, then the data of all tensors."""
    try:
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        view = memoryview(blob)
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= len(blob) - start:
                message = f"{name} lies outside the file"
                raise ValueError(message)
            label = f"{name}\0{entry['dtype']}\0{entry['shape']}\n".encode()
            found[name] = (label, view[start + begin : start + end])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"not a readable safetensors file: {error}"
        raise EngineError(
            message,
            hint="the file is cut short or of another format; publish the weights again",
        ) from error
    return found
