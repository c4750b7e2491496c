"""Safetensors files, one tensor at a time: no more than one is in memory, however large the model.

A safetensors file begins with a header that lists its tensors. The writer leaves room for it, puts
tensors behind it as they come, and fills the header in at the end; the format allows the spaces
that remain.
"""

# heavy imports: this file only runs in the trainer's own processes and in exports

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from swerl.core.errors import InputError, SwerlError
from swerl.engines._weights import combine, shards, tensor_digest

HEADER_BYTES = 1 << 18
"""Room for a header: about two thousand tensors. A file that would need more is ended."""
SHARD_BYTES = 5 * 10**9
"""Largest file, as the Hugging Face hub likes them."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class ShardWriter:
    """Writes a model's tensors into a folder; use it as a context manager.

    One file is called `model.safetensors`; several are numbered, with an index. After the end,
    `checksum` names the content as engines do. Every method raises OSError on a full disk.
    """

    def __init__(self, folder: Path, *, max_bytes: int = SHARD_BYTES) -> None:
        self.checksum = ""
        self.num_bytes = 0
        """Bytes of all tensors."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._digests: dict[str, bytes] = {}
        self._shards: list[list[str]] = []
        """Names of the tensors in each file."""
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._size = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._end_file()
            self._name_files()
            self.checksum = combine(self._digests)
        elif self._file is not None:
            self._file.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor. Raises ValueError where the name was there before."""
        if name in self._digests:
            raise ValueError(f"two tensors are called {name!r}")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        entry = {"dtype": dtype, "shape": shape}
        if self._is_full(name, len(data), entry):
            self._end_file()
        file = self._open()
        file.write(data)
        self._header[name] = {**entry, "data_offsets": [self._size, self._size + len(data)]}
        self._size += len(data)
        self.num_bytes += len(data)
        self._digests[name] = tensor_digest(name, dtype, shape, data)

    def _is_full(self, name: str, num_bytes: int, entry: Mapping[str, Any]) -> bool:
        if not self._header:
            return False
        listed = len(json.dumps({**self._header, name: {**entry, "data_offsets": [10**15] * 2}}))
        return self._size + num_bytes > self._max_bytes or listed > HEADER_BYTES

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._header = {"__metadata__": {"format": "pt"}}
            self._size = 0
            self._file = self._path(len(self._shards)).open("wb")
            self._file.write(HEADER_BYTES.to_bytes(8, "little") + b" " * HEADER_BYTES)
        return self._file

    def _end_file(self) -> None:
        if self._file is None:
            return
        header = json.dumps(self._header, separators=(",", ":")).encode()
        self._file.seek(8)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._shards.append([name for name in self._header if name != "__metadata__"])
        self._file, self._header = None, {}

    def _name_files(self) -> None:
        if len(self._shards) == 1:
            self._path(0).rename(self._folder / "model.safetensors")
            return
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._folder / "model.safetensors.index.json").write_text(text)

    def _path(self, number: int) -> Path:
        return self._folder / f"model-{number + 1:05d}.part"


class LazyTensors(Mapping[str, torch.Tensor]):
    """The tensors of a model folder, each read from its file when it is asked for.

    Use it as a context manager. Raises InputError on a folder that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        """Tensor name -> the open file that has it."""
        self._open = ExitStack()
        try:
            for path in shards(folder):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError, SwerlError) as error:
            self._open.close()
            raise self._unreadable(error) from error

    def __enter__(self) -> LazyTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._files[name]
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self._unreadable(error) from error
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _unreadable(self, error: BaseException) -> InputError:
        message = f"cannot read the weights in {self._folder}: {error}"
        return InputError(message, hint="is the folder whole? fetch or publish it again")
