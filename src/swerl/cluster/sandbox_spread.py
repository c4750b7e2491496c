"""One backend over the sandbox servers of several machines: each sandbox goes where fewest are.

Whoever looks after the servers says when one ends (`Site.lose`), which fails all that is in its
sandboxes at once, and when another stands in its place (`Site.serve`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import Limits, LiveSandbox, Mount
from swerl.sandboxes._e2b.sandbox import E2BSandbox
from swerl.sandboxes.e2b import E2BBackend


class Site:
    """One machine's sandboxes."""

    def __init__(self, name: str, changed: asyncio.Event) -> None:
        """`changed` is set when a server stands here, or none will any more."""
        self.name = name
        self.num_open = 0
        """Sandboxes of this run there, those being opened and closed with them."""
        self.backend: E2BBackend | None = None
        """None while nothing serves there."""
        self.is_over = False
        """Whether nothing will serve there any more."""
        self._changed = changed
        self._open: set[E2BSandbox] = set()
        self._lost: asyncio.Future[SandboxLostError]

    def serve(self, backend: E2BBackend) -> None:
        """Open what comes from now on by this backend."""
        self.backend = backend
        self._lost = asyncio.get_running_loop().create_future()
        self._changed.set()

    def lose(self, why: str, *, for_good: bool = False) -> None:
        """Fail everything in its sandboxes, and open none until another server stands, if ever."""
        self.backend, self.is_over = None, for_good
        self._changed.set()
        message = f"the sandbox server on {self.name} ended: {why}"
        error = SandboxLostError(message, hint="its log is with the run's other logs")
        if not self._lost.done():
            self._lost.set_result(error)
        for sandbox in list(self._open):
            sandbox.lose(error)

    @asynccontextmanager
    async def opened(
        self, image: str, limits: Limits, *, workdir: str, mounts: Sequence[Mount], name: str
    ) -> AsyncIterator[Sandbox]:
        """Open a sandbox here. Raises SandboxLostError where the server ends meanwhile."""
        assert self.backend is not None
        lost = self._lost
        context = self.backend.open(image, limits, workdir=workdir, mounts=mounts, name=name)
        self.num_open += 1
        try:
            sandbox = await _entered(context, lost)
            self._open.add(sandbox)
            if lost.done():
                sandbox.lose(lost.result())
            try:
                yield sandbox
            finally:
                try:
                    await context.__aexit__(None, None, None)
                except SandboxError:
                    if not lost.done():
                        raise
                finally:
                    self._open.discard(sandbox)
        finally:
            self.num_open -= 1


class Spread:
    """Implements SandboxBackend over sites."""

    def __init__(self, names: Sequence[str]) -> None:
        self._changed = asyncio.Event()
        self.sites = [Site(name, self._changed) for name in names]

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox of `image` on the machine with the fewest.

        Waits where none serves. Raises SandboxUnavailableError where none ever will.
        """
        return self._open(image, limits, workdir, mounts, name)

    async def live(self) -> Sequence[LiveSandbox]:
        """Return the sandboxes that the machines' servers hold."""
        backends = [site.backend for site in self.sites if site.backend]
        found = await asyncio.gather(*(backend.live() for backend in backends))
        return [each for some in found for each in some]

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name; nothing where none is."""
        backends = [site.backend for site in self.sites if site.backend]
        await asyncio.gather(*(backend.remove(name) for backend in backends))

    def price(self, limits: Limits) -> float:
        """Return 0: these machines are paid for."""
        return 0.0

    @asynccontextmanager
    async def _open(
        self, image: str, limits: Limits, workdir: str, mounts: Sequence[Mount], name: str
    ) -> AsyncIterator[Sandbox]:
        site = await self._emptiest()
        async with site.opened(image, limits, workdir=workdir, mounts=mounts, name=name) as sandbox:
            yield sandbox

    async def _emptiest(self) -> Site:
        while not (serving := [site for site in self.sites if site.backend]):
            if all(site.is_over for site in self.sites):
                message = "no machine of the cluster serves sandboxes any more"
                hint = "the logs sandboxes-*.log of the run say why; the same command goes on"
                raise SandboxUnavailableError(message, hint=hint)
            self._changed.clear()
            await self._changed.wait()
        return min(serving, key=lambda site: site.num_open)


async def _entered(
    context: AbstractAsyncContextManager[E2BSandbox], lost: asyncio.Future[SandboxLostError]
) -> E2BSandbox:
    """Return the open sandbox. Raises SandboxLostError as soon as its server has ended."""
    entering = asyncio.ensure_future(context.__aenter__())
    either: set[asyncio.Future[Any]] = {entering, lost}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not entering.done():
            raise lost.result()
        return entering.result()
    finally:
        if not entering.done():
            entering.cancel()
            await asyncio.gather(entering, return_exceptions=True)
