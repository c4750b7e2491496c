"""A backend that pulls an image at its first use, and protects it from `gc` meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from pydantic import BaseModel

from swerl.core.contracts import Sandbox, SandboxBackend, SnapshotBackend
from swerl.core.errors import ImageError
from swerl.core.image_reference import is_local
from swerl.core.sandbox import Limits, LiveSandbox, Mount
from swerl.images.store import Store, StoredImage, default_store

if TYPE_CHECKING:
    from swerl.images.pull import PullOptions


def on_demand(backend: SandboxBackend, options: BaseModel | None) -> SandboxBackend:
    """Wrap a backend if its settings have `pull`, as those of backends on the store do."""
    pull = getattr(options, "pull", None)
    return backend if pull is None else OnDemand(backend, default_store(), pull=pull == "missing")


class OnDemand:
    """A SandboxBackend around another one that runs images of the store."""

    def __init__(
        self,
        inner: SandboxBackend,
        store: Store,
        *,
        pull: bool = True,
        options: PullOptions | None = None,
    ) -> None:
        self._inner = inner
        self._store = store
        self._pull = pull
        self._options = options
        self._pulls: dict[str, asyncio.Task[StoredImage]] = {}

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox of `image`; pull it first if the store lacks it.

        Raises ImageError if the image cannot be pulled.
        """

        def begin() -> AbstractAsyncContextManager[Sandbox]:
            return self._inner.open(image, limits, workdir=workdir, mounts=mounts, name=name)

        return begin() if is_local(image) else self._open(image, begin)

    async def live(self) -> Sequence[LiveSandbox]:
        return await self._inner.live()

    async def remove(self, name: str) -> None:
        await self._inner.remove(name)

    def price(self, limits: Limits) -> float:
        return self._inner.price(limits)

    async def identify(self, image: str) -> str:
        """Return a text that changes with the image's content; pull the image if it is absent."""
        if not is_local(image):
            await self._ensure(image)
        inner = self._inner
        return await inner.identify(image) if isinstance(inner, SnapshotBackend) else ""

    async def find_snapshot(self, name: str) -> str:
        inner = self._inner
        return await inner.find_snapshot(name) if isinstance(inner, SnapshotBackend) else ""

    async def drop_snapshot(self, name: str) -> None:
        if isinstance(self._inner, SnapshotBackend):
            await self._inner.drop_snapshot(name)

    @asynccontextmanager
    async def _open(
        self, image: str, begin: Callable[[], AbstractAsyncContextManager[Sandbox]]
    ) -> AsyncIterator[Sandbox]:
        await self._ensure(image)
        with self._store.use(image):
            async with begin() as sandbox:
                yield sandbox

    async def _ensure(self, image: str) -> None:
        """Pull the image if it is absent; callers during a pull wait for that pull."""
        try:
            self._store.find(image)
        except ImageError:
            if not self._pull:
                raise
            task = self._pulls.get(image)
            if task is None:
                # The registry client is imported only if something is pulled.
                from swerl.images.pull import pull_one

                pulling = pull_one(image, self._store, options=self._options)
                task = self._pulls[image] = asyncio.create_task(pulling)
                task.add_done_callback(lambda done: self._forget(image, done))
            await asyncio.shield(task)

    def _forget(self, image: str, done: asyncio.Task[StoredImage]) -> None:
        del self._pulls[image]
        if not done.cancelled():
            done.exception()  # mark the error as seen: its callers have it, or are gone
