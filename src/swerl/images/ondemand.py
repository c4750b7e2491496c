"""A backend around another one, and one that pulls an image at its first use.

The image of an open sandbox is protected from `gc`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from swerl.core.contracts import Sandbox, SandboxBackend, SnapshotBackend
from swerl.core.errors import ImageError
from swerl.core.image_reference import is_local
from swerl.core.sandbox import Limits, LiveSandbox, Mount
from swerl.images.store import Store, StoredImage, default_store

if TYPE_CHECKING:
    from swerl.images.pull import PullOptions


def on_demand(name: str, backend: SandboxBackend) -> SandboxBackend:
    """Wrap the backend of this name if it runs images of the store."""
    return OnDemand(backend, default_store()) if name == "local" else backend


class WrappedBackend:
    """Forwards all but `open`, which a subclass has. Snapshots work if they do in the inner one."""

    def __init__(self, inner: SandboxBackend) -> None:
        self.inner = inner

    async def live(self) -> Sequence[LiveSandbox]:
        return await self.inner.live()

    async def remove(self, name: str) -> None:
        await self.inner.remove(name)

    def price(self, limits: Limits) -> float:
        return self.inner.price(limits)

    async def identify(self, image: str) -> str:
        inner = self.inner
        return await inner.identify(image) if isinstance(inner, SnapshotBackend) else ""

    async def find_snapshot(self, name: str) -> str:
        inner = self.inner
        return await inner.find_snapshot(name) if isinstance(inner, SnapshotBackend) else ""

    async def drop_snapshot(self, name: str) -> None:
        if isinstance(self.inner, SnapshotBackend):
            await self.inner.drop_snapshot(name)


class OnDemand(WrappedBackend):
    """A SandboxBackend around another one that runs images of the store."""

    def __init__(
        self,
        inner: SandboxBackend,
        store: Store,
        *,
        options: PullOptions | None = None,
    ) -> None:
        super().__init__(inner)
        self._store = store
        self._options = options
        self._pulls: dict[str, asyncio.Task[StoredImage]] = {}

    @asynccontextmanager
    async def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AsyncIterator[Sandbox]:
        """Create a sandbox of `image`; pull it first if the store lacks it.

        Raises ImageError if the image cannot be pulled.
        """
        async with AsyncExitStack() as stack:
            if not is_local(image):
                await self._ensure(image)
                stack.enter_context(self._store.use(image))
            inside = self.inner.open(image, limits, workdir=workdir, mounts=mounts, name=name)
            yield await stack.enter_async_context(inside)

    async def identify(self, image: str) -> str:
        """Return a text that changes with the image's content; pull the image if it is absent."""
        if not is_local(image):
            await self._ensure(image)
        return await super().identify(image)

    async def _ensure(self, image: str) -> None:
        """Pull the image if it is absent; callers during a pull wait for that pull."""
        try:
            self._store.find(image)
        except ImageError:
            task = self._pulls.get(image)
            if task is None:
                # The registry client is imported only if something is pulled.
                from swerl.images.pull import pull_one

                pulling = pull_one(image, self._store, options=self._options)
                task = self._pulls[image] = asyncio.create_task(pulling)
                task.add_done_callback(lambda pulled: self._forget(image, pulled))
            await asyncio.shield(task)

    def _forget(self, image: str, pull: asyncio.Task[StoredImage]) -> None:
        del self._pulls[image]
        if not pull.cancelled():
            pull.exception()  # mark the error as seen: its callers have it, or are gone
