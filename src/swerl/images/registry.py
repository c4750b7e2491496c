"""A client of one registry: manifests, blobs, mounts and uploads of the OCI distribution API.

Each method is one attempt; callers use `patiently` to retry.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode, urljoin

import aiohttp

from swerl.core.errors import ImageError
from swerl.core.image_reference import Reference
from swerl.images.http import ApiCall, RegistryConnection, RegistryOptions, expect, patiently
from swerl.images.manifest import (
    IMAGE_TYPES,
    INDEX_TYPES,
    MAX_DOCUMENT,
    Blob,
    Manifest,
    declared_type,
)
from swerl.images.store import Store

_ACCEPT = {"Accept": ", ".join(IMAGE_TYPES + INDEX_TYPES)}
_CHUNK = 1 << 20
_PART = 16 << 20
"""Bytes of one upload request, which are buffered in memory."""
_T = TypeVar("_T")


class Registries:
    """The registries of one run, a client per host. Methods raise ImageError."""

    def __init__(
        self, http: aiohttp.ClientSession, options: RegistryOptions, store: Store | None = None
    ) -> None:
        """With a `store`, keep manifests in it and do not request those again.

        Registries count manifests as pulls; the digest of a tag is free.
        """
        self._store = store
        self._http = http
        self._options = options
        self._clients: dict[str, Registry] = {}
        self._homes: dict[tuple[str, str], str] = {}
        """(registry, blob) -> a repository there that has it."""
        self._moving: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._slots = asyncio.Semaphore(options.workers)

    def at(self, host: str) -> Registry:
        if host not in self._clients:
            self._clients[host] = Registry(host, self._http, self._options.docker_config)
        return self._clients[host]

    async def patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `call`; retry after errors that may pass."""
        return await patiently(call, self._options.patience)

    async def push_blob(
        self,
        place: Reference,
        blob: Blob,
        read: Callable[[], AsyncGenerator[bytes]],
        *,
        home: str = "",
    ) -> bool:
        """Store a blob in a repository unless it has it; return whether it was read.

        It is mounted from another repository of that registry if one is known to have it, such as
        `home`.
        """
        registry, repository = self.at(place.registry), place.repository
        key = (place.registry, blob.digest)

        async def upload() -> None:
            async with aclosing(read()) as pieces:
                await registry.upload(repository, blob, pieces)

        async with self._moving[key], self._slots:
            is_there = await self.patiently(lambda: registry.has_blob(repository, blob.digest))
            if not is_there and (origin := self._homes.get(key, home)):
                with suppress(ImageError):  # refused: upload it
                    is_there = await self.patiently(
                        lambda: registry.mount(repository, blob.digest, home=origin)
                    )
            if not is_there:
                await self.patiently(upload)
            self._homes[key] = repository
        return not is_there

    async def manifest(self, source: Reference, platform: tuple[str, str]) -> Manifest:
        """Return an image's manifest; of an index, the manifest for a platform."""
        manifest = await self._manifest(source, source.version)
        if not manifest.is_index:
            return manifest
        return await self._manifest(source, manifest.platform_digest(platform))

    async def _manifest(self, source: Reference, version: str) -> Manifest:
        registry, repository = self.at(source.registry), source.repository
        digest = version if ":" in version else ""
        if self._store and not digest:
            digest = await self.patiently(lambda: registry.manifest_digest(repository, version))
        if self._store and (stored := _stored(self._store, str(source), digest)):
            return stored
        manifest = await self.patiently(lambda: registry.manifest(repository, version))
        if self._store:
            self._store.put(manifest.body)
        return manifest


def _stored(store: Store, name: str, digest: str) -> Manifest | None:
    """Return a stored manifest that declares its own media type, or None."""
    with suppress(ImageError):  # missing or damaged: the registry has it
        body = store.read(digest, name)
        if kind := declared_type(body):
            return Manifest(name, body, kind)
    return None


class Registry:
    def __init__(self, host: str, http: aiohttp.ClientSession, docker_config: Path) -> None:
        self.host = host
        self._connection = RegistryConnection(host, http, docker_config)

    async def ping(self) -> None:
        """Raise ImageError unless a registry answers and accepts the login."""
        async with self._connection.send(ApiCall("GET", "")) as response:
            self._expect(response, {200}, "its API")

    async def manifest(self, repository: str, version: str) -> Manifest:
        """Return the manifest of a tag or digest; a digest is verified."""
        what = f"{repository}{'@' if ':' in version else ':'}{version}"
        ask = ApiCall("GET", f"{repository}/manifests/{version}", repository, _ACCEPT)
        body = b""
        async with self._connection.send(ask) as response:
            self._expect(response, {200}, what)
            async for chunk in response.content.iter_chunked(_CHUNK):
                body += chunk
                if len(body) > MAX_DOCUMENT:
                    raise ImageError(
                        f"the manifest of {self.host}/{what} is larger than 4 MiB",
                        hint="images do not need that much; check the registry",
                    )
            # Some registries send every manifest as JSON or text.
            media_type = declared_type(body) or response.content_type
            manifest = Manifest(f"{self.host}/{what}", body, media_type)
        if ":" in version and manifest.digest != version:
            raise ImageError(
                f"registry {self.host} sent content that does not match {what}: {manifest.digest}",
                hint="a proxy or cache in between may be broken",
            )
        return manifest

    async def manifest_digest(self, repository: str, version: str) -> str:
        """Return the digest of a tag's manifest, which no registry counts as a pull.

        Empty if the registry does not report it.
        """
        what = f"{repository}{'@' if ':' in version else ':'}{version}"
        ask = ApiCall("HEAD", f"{repository}/manifests/{version}", repository, _ACCEPT)
        async with self._connection.send(ask) as response:
            self._expect(response, {200, 405}, what)  # some registries answer GET alone
            return response.headers.get("Docker-Content-Digest", "")

    async def has_manifest(self, repository: str, digest: str) -> bool:
        """Return whether a repository that we push to has this manifest."""
        path = f"{repository}/manifests/{digest}"
        return await self._has(ApiCall("HEAD", path, _push(repository), _ACCEPT))

    async def has_blob(self, repository: str, digest: str) -> bool:
        """Return whether a repository that we push to has this blob."""
        return await self._has(ApiCall("HEAD", f"{repository}/blobs/{digest}", _push(repository)))

    async def blob(self, repository: str, blob: Blob) -> AsyncGenerator[bytes]:
        """Yield a blob's bytes; the last ones only after the size and digest are verified."""
        what = f"{repository}@{blob.digest}"
        # Compressed again on the way, the bytes could not be counted.
        headers = {"Accept-Encoding": "identity"}
        ask = ApiCall("GET", f"{repository}/blobs/{blob.digest}", repository, headers)
        async with self._connection.send(ask) as response:
            self._expect(response, {200}, what)
            pieces = response.content.iter_chunked(_CHUNK)
            async for piece in verified(pieces, blob, source=f"registry {self.host}", what=what):
                yield piece

    async def mount(self, repository: str, digest: str, *, home: str) -> bool:
        """Share a blob of the repository `home` with `repository`; return whether it worked."""
        query = urlencode({"mount": digest, "from": home})
        scope = f"{_push(repository)} repository:{home}:pull"
        ask = ApiCall("POST", f"{repository}/blobs/uploads/?{query}", scope)
        async with self._connection.send(ask) as response:
            self._expect(response, {201, 202}, repository)
            if response.status == 201:
                return True
            location = _location(response)
        await self._cancel(location, scope)
        return False

    async def upload(self, repository: str, blob: Blob, chunks: AsyncIterator[bytes]) -> None:
        """Store a blob. If `chunks` or the connection fails, nothing of it stays.

        The blob goes in parts, each a whole request, so an error of the source never interrupts a
        request: a registry cannot cancel an upload that it is still reading.
        """
        scope = _push(repository)
        location = await self._step(ApiCall("POST", f"{repository}/blobs/uploads/", scope), {202})
        try:
            offset = 0
            async for part in _parts(chunks):
                headers = {
                    "Content-Range": f"{offset}-{offset + len(part) - 1}",
                    "Content-Type": "application/octet-stream",
                }
                location = await self._step(ApiCall("PATCH", location, scope, headers, part), {202})
                offset += len(part)
            digest = urlencode({"digest": blob.digest})
            whole = f"{location}{'&' if '?' in location else '?'}{digest}"
            await self._step(ApiCall("PUT", whole, scope), {201, 204})
        except BaseException:
            await asyncio.shield(self._cancel(location, scope))
            raise

    async def put_manifest(self, repository: str, version: str, manifest: Manifest) -> None:
        """Store a manifest under a tag or digest; its blobs must exist."""
        what = f"{repository}:{version}"
        ask = ApiCall(
            "PUT",
            f"{repository}/manifests/{version}",
            _push(repository),
            {"Content-Type": manifest.media_type},
            manifest.body,
        )
        async with self._connection.send(ask) as response:
            self._expect(response, {200, 201}, what)
            stored = response.headers.get("Docker-Content-Digest", manifest.digest)
        if stored != manifest.digest:
            raise ImageError(
                f"registry {self.host} stored {what} as {stored}",
                hint=f"expected {manifest.digest}; check for a proxy in between",
            )

    async def _has(self, ask: ApiCall) -> bool:
        async with self._connection.send(ask) as response:
            self._expect(response, {200, 404}, ask.path)
            return response.status == 200

    async def _step(self, ask: ApiCall, statuses: set[int]) -> str:
        """Do one step of an upload and return the URL of the next one."""
        async with self._connection.send(ask) as response:
            self._expect(response, statuses, ask.scope.split(":")[1])
            return _location(response)

    async def _cancel(self, location: str, scope: str) -> None:
        # The registry drops abandoned uploads itself: keep the first error.
        with suppress(ImageError):
            async with self._connection.send(ApiCall("DELETE", location, scope)):
                pass

    def _expect(self, response: aiohttp.ClientResponse, statuses: set[int], what: str) -> None:
        expect(response, statuses, host=self.host, what=what)


def _push(repository: str) -> str:
    return f"repository:{repository}:pull,push"


async def verified(
    pieces: AsyncIterator[bytes], blob: Blob, *, source: str, what: str
) -> AsyncGenerator[bytes]:
    """Yield the pieces of a blob; the last one only after the size and digest are verified."""
    digest, size, pending = hashlib.sha256(), 0, b""
    async for piece in pieces:
        if pending:
            yield pending
        digest.update(piece)
        size += len(piece)
        pending = piece
        if size > blob.size:
            message = f"{source} sent more than {what}"
            raise ImageError(message, hint=f"it has {blob.size} bytes; this copy is damaged")
    if size < blob.size:
        raise ImageError(
            f"{source} sent {size} of {blob.size} bytes of {what}",
            hint="run the same command again",
            retryable=True,
        )
    if f"sha256:{digest.hexdigest()}" != blob.digest:
        raise ImageError(
            f"{source} sent content that does not match {what}",
            hint="its copy is damaged; push or save the image again",
        )
    yield pending


async def _parts(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    pending: list[bytes] = []
    async for chunk in chunks:
        pending.append(chunk)
        if sum(map(len, pending)) >= _PART:
            yield b"".join(pending)
            pending.clear()
    if pending:
        yield b"".join(pending)


def _location(response: aiohttp.ClientResponse) -> str:
    return urljoin(str(response.url), response.headers.get("Location", ""))
