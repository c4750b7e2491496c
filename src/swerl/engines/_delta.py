"""Weight deltas: send only the bits that changed since the last version, without loss.

The trainer keeps whole versions in a local folder and writes `<name>.delta` into a shared one. On
an engine's machine `fetch` rebuilds the whole version in that machine's local folder, from which
the engine loads it: no engine reads deltas itself. A version's name ends with its checksum, and a
delta names its base, so a late, reordered or abandoned version is never mistaken for another.

A file holds a header line of JSON, then the compressed pieces of each model file in order. A piece
is XOR with the base (or the bytes themselves), its even bytes before its odd ones: in bf16 a small
step changes few low bytes and hardly any high one. A new start and every 20th version are whole.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerl.core.errors import EngineError, InputError
from swerl.core.files import disk_errors
from swerl.core.learning import WeightRef
from swerl.engines._weights import ADAPTER_CONFIG, checksum

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".delta"
NAME = re.compile(r"\d{6,}-[0-9a-f]{12}")
"""Name of a version: the number of steps, and the begin of its checksum."""
_CHUNK = 1 << 25
"""Bytes of one piece; both sides hold two of them."""
_WHOLE_EVERY = 20
"""Versions between two whole ones: a late machine applies at most as many deltas."""
_KEPT = 2
"""Whole versions kept in a local folder: the one that serves and the one before it."""
_LEVEL = 3


@dataclass(slots=True)
class DeltaWriter:
    """Writes the deltas of one start of the trainer."""

    shared: Path
    """Folder that the engines' machines read."""
    base: str = ""
    """Name of the last version; empty before the first."""
    num_since_whole: int = 0

    def write(self, ref: WeightRef) -> WeightRef:
        """Write the delta of a version whose whole folder is local; return its reference.

        Raises RunError on a full disk.
        """
        name = f"{ref.version}-{ref.checksum[:12]}"
        whole, delta = ref.path.with_name(name), self.shared / f"{name}{SUFFIX}"
        is_whole = not self.base or self.num_since_whole + 1 >= _WHOLE_EVERY
        base = None if is_whole else whole.with_name(self.base)
        if name == self.base:  # the same weights again, as after a skipped step
            shutil.rmtree(ref.path)
            return replace(ref, path=whole, delta=delta)
        with disk_errors(delta):
            if whole.exists():
                shutil.rmtree(whole)
            ref.path.rename(whole)
            temporary = delta.with_suffix(".part")
            encode(whole, base, temporary, {"base": base.name if base else ""})
            temporary.replace(delta)
            self.num_since_whole = 0 if is_whole else self.num_since_whole + 1
            if self.num_since_whole == 1:
                # Servers had a whole step's time to leave the versions before the last whole one.
                for old in self.shared.glob(f"*{SUFFIX}"):
                    if old.name not in (delta.name, f"{self.base}{SUFFIX}"):
                        old.unlink(missing_ok=True)
        self.base = name
        return replace(ref, path=whole, delta=delta)


def fetch(ref: WeightRef) -> None:
    """Rebuild the whole folder `ref.path` on this machine, unless it is there.

    It appears whole under its name once its checksum agrees. Raises EngineError on a torn or
    changed delta, or if one that it is based on is gone.
    """
    if ref.delta is None:
        return
    local = ref.path.parent
    with disk_errors(local):
        local.mkdir(parents=True, exist_ok=True)
        # Several servers of a machine load at the same time.
        with (local / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if ref.path.is_dir():
                # SGLang has no checksum of adapters, which are few bytes.
                if not (ref.path / ADAPTER_CONFIG).exists() or checksum(ref.path) == ref.checksum:
                    return
                shutil.rmtree(ref.path)
            for _ in range(2):
                if (found := _rebuild(ref, ref.delta, local)) == ref.checksum:
                    return
                # A version on this disk has changed: begin again with the last whole one.
                _prune(local, keep=0)
            raise EngineError(
                f"weights {ref.version!r} arrived changed: {found} is not {ref.checksum}",
                hint="a delta was replaced; a new start of the run sends whole weights",
            )


async def fetch_here(ref: WeightRef) -> None:
    """Call `fetch` in a thread."""
    await asyncio.to_thread(fetch, ref)


def chain(delta: Path, local: Path | None = None) -> list[str]:
    """Return the versions to rebuild, oldest first: from the last one in `local`, or a whole one.

    Raises EngineError if a delta is gone or damaged.
    """
    names = [delta.name.removesuffix(SUFFIX)]
    while True:
        with _opened(delta.with_name(f"{names[0]}{SUFFIX}")) as (header, _):
            base = str(header["base"])
        if not base or (local and (local / base).is_dir()):
            return names
        names.insert(0, base)


def _rebuild(ref: WeightRef, delta: Path, local: Path) -> str:
    """Rebuild a version and return its checksum; it gets its name if that is the expected one."""
    names, work = chain(delta, local), local / ".part"
    with _opened(delta.with_name(f"{names[0]}{SUFFIX}")) as (header, _):
        # Together with the new one, two versions stay.
        _prune(local, str(header["base"]), keep=_KEPT - 1)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for place, name in enumerate(names):
        delta = delta.with_name(f"{name}{SUFFIX}")
        decode(delta, work if place else local, work / name)
        if place:
            shutil.rmtree(work / names[place - 1])
    # Only the version that will be loaded is checked; a wrong base spoils it, too.
    made = work / names[-1]
    if (found := checksum(made)) == ref.checksum:
        made.rename(ref.path)
    shutil.rmtree(work)
    return found


def _prune(local: Path, newest: str = "", *, keep: int) -> None:
    """Remove the oldest whole versions; `newest` counts as the newest of the kept ones."""
    folders = [each for each in local.iterdir() if NAME.fullmatch(each.name) and each.is_dir()]
    folders.sort(key=lambda path: (path.name != newest, -path.stat().st_mtime_ns))
    for old in folders[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def encode(whole: Path, base: Path | None, delta: Path, about: dict[str, Any]) -> int:
    """Write the difference of two model folders; return its bytes.

    Raises InputError without the package zstandard.
    """
    pieces, files = [], {}
    compressor = require_zstandard().ZstdCompressor(level=_LEVEL, threads=-1, write_checksum=True)
    body = delta.with_suffix(".body")
    with body.open("wb") as out:
        for path in sorted(whole.iterdir()):
            files[path.name] = path.stat().st_size
            for chunk in _differences(path, base / path.name if base else None):
                packed = compressor.compress(chunk.tobytes())
                pieces.append(len(packed))
                out.write(packed)
    with delta.open("wb") as out, body.open("rb") as packed_pieces:
        header = {**about, "files": files, "pieces": pieces, "chunk": _CHUNK}
        out.write(json.dumps(header).encode() + b"\n")
        shutil.copyfileobj(packed_pieces, out, _CHUNK)
        out.flush()
        os.fsync(out.fileno())
    body.unlink()
    return delta.stat().st_size


def decode(delta: Path, local: Path, target: Path) -> None:
    """Rebuild a model folder from a delta and its base, a folder in `local`.

    Raises EngineError on a damaged one.
    """
    import numpy as np

    decompressor = require_zstandard().ZstdDecompressor()
    target.mkdir()
    with _opened(delta) as (header, file):
        base, sizes = local / header["base"], iter(header["pieces"])
        for name, size in header["files"].items():
            old = base / name if header["base"] else None
            with (target / Path(name).name).open("wb") as out:
                for start in range(0, size, header["chunk"]):
                    packed = file.read(next(sizes))
                    planes = np.frombuffer(decompressor.decompress(packed), "u1")
                    chunk = _joined(planes)
                    known = _bytes(old, start, header["chunk"])
                    if len(known) == len(chunk):
                        chunk = chunk ^ known
                    out.write(chunk.tobytes())


def _differences(path: Path, old: Path | None) -> Iterator[np.ndarray[Any, Any]]:
    """Yield a file's pieces, XOR those of an older file where both have as many bytes."""
    import numpy as np

    for start in range(0, path.stat().st_size, _CHUNK):
        chunk, known = _bytes(path, start, _CHUNK), _bytes(old, start, _CHUNK)
        if len(chunk) == len(known):
            chunk = chunk ^ known
        yield np.concatenate([chunk[::2], chunk[1::2]])


def _joined(planes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    chunk, num_even = planes.copy(), -(-len(planes) // 2)
    chunk[::2], chunk[1::2] = planes[:num_even], planes[num_even:]
    return chunk


def _bytes(path: Path | None, start: int, count: int) -> np.ndarray[Any, Any]:
    """Return a piece of a file; empty without a file."""
    import numpy as np

    if path is None or not path.is_file():
        return np.empty(0, "u1")
    return np.fromfile(path, "u1", count=count, offset=start)


@contextmanager
def _opened(delta: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Open a delta behind its header; every error of its content becomes an EngineError."""
    zstandard = require_zstandard()
    try:
        with delta.open("rb") as file:
            yield json.loads(file.readline()), file
    except (FileNotFoundError, ValueError, KeyError, StopIteration, zstandard.ZstdError) as error:
        raise EngineError(
            f"the weight delta {delta} is missing or damaged: {error!r}",
            hint="the next whole version repairs it: a new start of the run, or every 20th step",
        ) from error


def require_zstandard() -> Any:
    """Return the module. Raises InputError if it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise InputError(
            "weight deltas need the package zstandard", hint="pip install 'swerl[zstd]'"
        ) from error
    return zstandard
