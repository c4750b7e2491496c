"""Read and write model folders in Hugging Face format, one file's tensors in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerl.core.chat import Json
from swerl.core.errors import InputError, SwerlError
from swerl.core.files import disk_errors
from swerl.core.learning import WeightRef
from swerl.engines._weights import combine, shards, tensor_digest

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 * 10**9
"""Largest file, unless one tensor is larger: it is in memory twice while it is written."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Files that are copied with the weights."""
KEPT_VERSIONS = 2
"""Published folders kept: the one that serves and the one before it."""
_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
"""torch's name of a type -> its name in a safetensors header."""


def read_config(folder: Path) -> dict[str, Json]:
    """Return the model's config.json. Raises InputError if it is missing or is not JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {path}: {error}", hint="name a model folder in Hugging Face format"
        ) from error
    assert isinstance(config, dict)
    return config


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source != target:
            shutil.copyfile(source / name, target / name)


def publish(tensors: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path) -> WeightRef:
    """Write Hugging Face tensors as a model folder, which appears whole under its version.

    config.json and the tokenizer are copied from `source`. Older versions are removed. Raises
    RunError on a full disk.
    """
    temporary = target.with_name(f".{target.name}.part")
    try:
        with disk_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            with ShardWriter(temporary) as writer:
                for name, tensor in tensors:
                    writer.add(name, tensor)
            shutil.copyfile(source / "config.json", temporary / "config.json")
            copy_tokenizer(source, temporary)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    # Remove all but the folders written last, whatever their names: a run may step back.
    folders = [path for path in target.parent.iterdir() if path.is_dir() and path.name[0] != "."]
    folders.sort(key=lambda path: path.stat().st_mtime_ns)
    for old in folders[:-KEPT_VERSIONS]:
        shutil.rmtree(old, ignore_errors=True)
    return WeightRef(target, target.name, writer.checksum)


class ShardWriter:
    """Write a model's tensors into a folder; use it as a context manager.

    A single file is named `model.safetensors`; several are numbered and indexed. One file's tensors
    are in memory at a time. On exit, `checksum` is set, computed as engines compute it. Every
    method raises OSError on a full disk.
    """

    def __init__(self, folder: Path, *, max_bytes: int = SHARD_BYTES) -> None:
        self.checksum = ""
        self.num_bytes = 0
        """Bytes of all tensors."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._digests: dict[str, bytes] = {}
        self._shards: list[list[str]] = []
        """Tensor names, by file."""
        self._tensors: dict[str, torch.Tensor] = {}
        """Those of the next file."""
        self._size = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._write_file()
            self._name_files()
            self.checksum = combine(self._digests)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. Raises ValueError if the name was added before."""
        if name in self._digests:
            raise ValueError(f"two tensors are called {name!r}")
        import torch

        # A copy: the tensor may be a view of others, or change before the file is written.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        data = copy.reshape(-1).view(torch.uint8).numpy().data
        if self._size + len(data) > self._max_bytes:
            self._write_file()
        self._tensors[name] = copy
        self._size += len(data)
        self.num_bytes += len(data)
        dtype = _DTYPES[str(tensor.dtype)]
        self._digests[name] = tensor_digest(name, dtype, tensor.shape, data)

    def _write_file(self) -> None:
        if not self._tensors:
            return
        from safetensors.torch import save

        path = self._path(len(self._shards))
        with path.open("wb") as file:
            file.write(save(self._tensors, {"format": "pt"}))
            file.flush()
            os.fsync(file.fileno())
        self._shards.append([*self._tensors])
        self._tensors, self._size = {}, 0

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


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """The tensors of a model folder, each read from its file on access.

    Use it as a context manager. Raises InputError if the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

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
        from safetensors import SafetensorError

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
        return InputError(message, hint="the folder may be incomplete: fetch or publish it again")
