"""The registries of one run: one client a host, logins and patience shared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import aiohttp

from swerl.images._http import Patience, patiently
from swerl.images._registry import Registry
from swerl.oci.manifest import Manifest
from swerl.oci.reference import Reference

_T = TypeVar("_T")


class Registries:
    """Clients by host. Methods raise ImageError."""

    def __init__(
        self, http: aiohttp.ClientSession, docker_config: Path, patience: Patience
    ) -> None:
        self._http = http
        self._docker_config = docker_config
        self._patience = patience
        self._clients: dict[str, Registry] = {}

    def at(self, host: str) -> Registry:
        """Return the client of one registry."""
        if host not in self._clients:
            self._clients[host] = Registry(host, self._http, self._docker_config)
        return self._clients[host]

    async def patiently(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `call` returns, trying again after errors that may pass."""
        return await patiently(call, self._patience)

    async def manifest(self, source: Reference, platform: tuple[str, str]) -> Manifest:
        """Return an image's manifest, out of an index the one for a platform."""
        registry = self.at(source.registry)
        found = await self.patiently(lambda: registry.manifest(source.repository, source.version))
        if not found.is_index:
            return found
        digest = found.platform_digest(platform)
        return await self.patiently(lambda: registry.manifest(source.repository, digest))
