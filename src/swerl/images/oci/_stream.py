"""The uncompressed bytes of a layer, made in a thread ahead of their reader.

Decompressing and hashing release the interpreter's lock, so they cost the writer of files almost
no time. Memory stays bounded: a few pieces wait at most, and a piece is never larger than _PIECE,
whatever a compressed byte stands for.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swerl.core.errors import ImageError

_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_DAMAGED = "fetch it again with `swerl images verify --repair`; else push the image anew"
_END = b""


class LayerStream:
    """Reads the tar of a layer file: gzip, zstd or plain, told apart by the first bytes."""

    def __init__(self, file: Path, *, max_bytes: int, stop: threading.Event | None = None) -> None:
        """Begin to read. More than `max_bytes` uncompressed is an ImageError, and so is `stop`."""
        self._file = file
        self._max_bytes = max_bytes
        self._sum = hashlib.sha256()
        self._pieces: queue.Queue[bytes | Exception] = queue.Queue(maxsize=8)
        self._rest = memoryview(b"")
        self._ended = False
        self._stopped = stop or threading.Event()
        self._thread = threading.Thread(target=self._produce, name="layer", daemon=True)
        self._thread.start()

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, none at the end. Raises ImageError on damage."""
        if not self._rest and not self._ended:
            piece = self._pieces.get()
            if isinstance(piece, Exception):
                self._ended = True
                raise piece
            self._ended = piece == _END
            self._rest = memoryview(piece)
        taken, self._rest = self._rest[:size], self._rest[size:]
        return bytes(taken)

    def finish(self) -> str:
        """Read what is left and return the digest of everything. Raises ImageError."""
        while self.read(_PIECE):
            pass
        return "sha256:" + self._sum.hexdigest()

    def close(self) -> None:
        """Stop the thread, whatever is left."""
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._pieces.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def _produce(self) -> None:
        try:
            with self._file.open("rb") as file:
                self._pump(file)
            self._pieces.put(_END)
        except Exception as error:  # noqa: BLE001  # carried over to the reader's thread
            self._pieces.put(error)

    def _pump(self, file: BinaryIO) -> None:
        size = 0
        for piece in _decompressed(file):
            if self._stopped.is_set():
                raise ImageError(
                    "the work on a layer was stopped", hint="run the same command again"
                )
            size += len(piece)
            if size > self._max_bytes:
                message = f"a layer unpacks to more than {self._max_bytes >> 20} MiB"
                hint = "far more than its compressed size allows; do not trust this image"
                raise ImageError(message, hint=hint)
            self._sum.update(piece)
            self._pieces.put(piece)


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    head = file.read(4)
    file.seek(0)
    if head.startswith(_GZIP):
        return _gunzip(file)
    if head == _ZSTD:
        return _unzstd(file)
    return iter(lambda: file.read(_PIECE), b"")


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of gzip members in a row; zeros may follow them, as gzip allows."""
    decoder = zlib.decompressobj(wbits=31)
    data = b""
    try:
        while data := data or file.read(_PIECE // 4):
            if decoder.eof:
                data = data.lstrip(b"\0")
                decoder = zlib.decompressobj(wbits=31) if data else decoder
                continue
            if piece := decoder.decompress(data, _PIECE):
                yield piece
            data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
        while piece := decoder.decompress(b"", _PIECE):
            yield piece
    except zlib.error as error:
        raise ImageError(f"a layer's gzip data is damaged: {error}", hint=_DAMAGED) from error
    if not decoder.eof:
        raise ImageError("a layer's gzip data ends in the middle", hint=_DAMAGED)


def _unzstd(file: BinaryIO) -> Iterator[bytes]:
    library = _zstandard()
    try:
        reader = library.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        while piece := reader.read(_PIECE):
            yield piece
    except library.ZstdError as error:
        raise ImageError(f"a layer's zstd data is damaged: {error}", hint=_DAMAGED) from error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImageError(
            "a layer is packed with zstd, which needs the package `zstandard`",
            hint="pip install zstandard",
        ) from error
    return zstandard
