"""`/files`: whole files in and out of a sandbox."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from aiohttp import BodyPartReader, web

from swerl.core.chat import Json
from swerl.sandboxes.e2b_server.access import named_user
from swerl.sandboxes.e2b_server.connect import IDLE_S, read_body
from swerl.sandboxes.e2b_server.failure import Code, Failure
from swerl.sandboxes.e2b_server.paths import resolve

if TYPE_CHECKING:
    from swerl.sandboxes.e2b_server.boxes import Box

_FILE_NAME = re.compile(r';\s*filename="((?:[^"\\]|\\.)*)"', re.DOTALL)
_READS_AT_ONCE = 8
_LARGE_UPLOADS_AT_ONCE = 16
"""Files that are held in memory while they arrive, over all sandboxes."""
_SMALL_BYTES = 1 << 20
"""Uploads up to here wait for nobody."""
_SLICE_BYTES = 1 << 20


class Transfers:
    """Moves files, not too many at once; who takes or sends nothing for a while is dropped."""

    def __init__(self, max_file_bytes: int) -> None:
        self._max_bytes = max_file_bytes
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)
        self._large_uploads = asyncio.Semaphore(_LARGE_UPLOADS_AT_ONCE)

    async def download(self, box: Box, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with a file's bytes."""
        path = _path(box, request.query, request.query.get("path", ""))
        async with self._reads:
            data = await box.sandbox.read(path)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = len(data)
        await response.prepare(request)
        for start in range(0, len(data), _SLICE_BYTES):
            try:
                async with asyncio.timeout(IDLE_S):
                    await response.write(memoryview(data)[start : start + _SLICE_BYTES])
            except TimeoutError as error:
                raise ConnectionAbortedError("the client takes nothing any more") from error
        await response.write_eof()
        return response

    async def upload(self, box: Box, request: web.BaseRequest) -> list[Json]:
        """Write the file, or files, of a request; return what was written."""
        length = request.content_length
        is_small = length is not None and length <= _SMALL_BYTES
        async with nullcontext() if is_small else self._large_uploads:
            if request.headers.get("Expect", "").lower() == "100-continue" and request.transport:
                request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # curl waits for it
            if request.content_type == "application/octet-stream":
                path = _path(box, request.query, request.query.get("path", ""))
                await _write(box, request, path, await read_body(request, self._max_bytes))
                return [_written(path)]
            if request.content_type.startswith("multipart/"):
                return await self._upload_parts(box, request)
        message = f"content type {request.content_type!r} is neither multipart nor octet-stream"
        raise Failure(Code.INVALID_ARGUMENT, message)

    async def _upload_parts(self, box: Box, request: web.BaseRequest) -> list[Json]:
        paths: list[str] = []
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader) or part.name != "file":
                    continue
                path = _path(box, request.query, request.query.get("path") or _file_name(part))
                if path in paths:
                    message = f"one request holds two files for {path}; the first was written"
                    raise Failure(Code.INVALID_ARGUMENT, message)
                await _write(box, request, path, await self._read_part(part))
                paths.append(path)
        except (ValueError, AssertionError) as error:
            raise Failure(Code.INVALID_ARGUMENT, f"cannot read the form: {error}") from error
        return [_written(path) for path in paths]

    async def _read_part(self, part: BodyPartReader) -> bytes:
        body = bytearray()
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    chunk = await part.read_chunk(1 << 16)
            except TimeoutError as error:
                raise Failure(Code.CANCELED, "the file did not arrive", status=408) from error
            if not chunk:
                return bytes(body)
            body += chunk
            if len(body) > self._max_bytes:
                message = f"the file is larger than {self._max_bytes} bytes"
                raise Failure(Code.RESOURCE_EXHAUSTED, message, status=413)


async def _write(box: Box, request: web.BaseRequest, path: str, data: bytes) -> None:
    """Write a file; outside of their own folders its user may not have been able to."""
    await box.sandbox.write(path, data)
    user = named_user(request.query.get("username", ""))
    if user is None and not path.startswith((f"{box.workdir}/", "/tmp/")):
        await box.folders.give(path)


def _path(box: Box, query: Mapping[str, str], given: str) -> str:
    if not given or "\0" in given:
        raise Failure(Code.INVALID_ARGUMENT, "the request names no file")
    return resolve(given, box.home(named_user(query.get("username", ""))))


def _file_name(part: BodyPartReader) -> str:
    """Return a part's file name as it was sent: aiohttp's own reader drops a leading slash."""
    if match := _FILE_NAME.search(part.headers.get("Content-Disposition", "")):
        return re.sub(r"\\(.)", r"\1", match[1])
    return part.filename or ""


def _written(path: str) -> Json:
    return {"path": path, "name": posixpath.basename(path), "type": "file"}
