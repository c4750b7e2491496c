"""The registries of one run: one client a host, logins and patience shared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp

from swerl.core.image_reference import Reference
from swerl.images._http import Patience, patiently
from swerl.images._registry import Quota, Registry
from swerl.images.oci.manifest import Manifest, declared_type, sha256
from swerl.images.oci.store import Store

_T = TypeVar("_T")


class Registries:
    """Clients by host. Methods raise ImageError."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        docker_config: Path,
        patience: Patience,
        store: Store | None = None,
    ) -> None:
        """Keep manifests in `store`, where one is given, and ask for none of those there.

        Registries count manifests as pulls; what a tag stands for may be asked freely.
        """
        self._store = store
        self._http = http
        self._docker_config = docker_config
        self._patience = patience
        self._clients: dict[str, Registry] = {}

    def at(self, host: str) -> Registry:
        """Return the client of one registry."""
        if host not in self._clients:
            self._clients[host] = Registry(host, self._http, self._docker_config)
        return self._clients[host]

    def quotas(self) -> dict[str, Quota]:
        """Return what the registries said about their limits, by host."""
        return {host: client.quota for host, client in self._clients.items() if client.quota}

    async def patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `call` returns, trying again after errors that may pass."""
        return await patiently(call, self._patience)

    async def manifest(self, source: Reference, platform: tuple[str, str]) -> Manifest:
        """Return an image's manifest, out of an index the one for a platform."""
        found = await self._manifest(source, source.version)
        if not found.is_index:
            return found
        return await self._manifest(source, found.platform_digest(platform))

    async def _manifest(self, source: Reference, version: str) -> Manifest:
        registry, repository = self.at(source.registry), source.repository
        digest = version if ":" in version else ""
        if self._store and not digest:
            digest = await self.patiently(lambda: registry.manifest_digest(repository, version))
        if self._store and (known := _stored(self._store, str(source), digest)):
            return known
        found = await self.patiently(lambda: registry.manifest(repository, version))
        if self._store:
            self._store.put(found.body)
        return found


def _stored(store: Store, name: str, digest: str) -> Manifest | None:
    """Return a manifest of the store that says itself of which kind it is."""
    path = store.blob(digest) if digest else None
    if path is None or not path.is_file():
        return None
    body = path.read_bytes()
    if sha256(body) != digest:  # damaged: what the registry has takes its place
        path.unlink(missing_ok=True)
        return None
    kind = declared_type(body)
    return Manifest(name, body, kind) if kind else None
