"""Model folders on disk: find their safetensors files and name their content by a checksum.

The checksum depends on names, types, shapes and bytes of the tensors, not on how they are spread
over files or ordered in them. Only the standard library is needed, so trainers and engines agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from swerl.engines._sglang_wire import ModelShape
from swerl.errors import EngineError

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""How model lines call the number of routed experts."""


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


def model_shape(folder: Path) -> ModelShape:
    """Return what the folder's config.json states."""
    try:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        vocab = config.get("vocab_size") or text.get("vocab_size")
        experts = next((text[name] for name in _EXPERTS if text.get(name)), 0)
        return ModelShape(
            num_vocab=None if vocab is None else int(vocab),
            num_layers=int(text.get("num_hidden_layers") or 0),
            top_k_experts=int(text.get("num_experts_per_tok") or 0),
            num_experts=int(experts),
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return ModelShape()


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
