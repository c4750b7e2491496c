"""The sandbox side: one live isolated machine, what runs in it, and who makes it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from swerl.core.sandbox import Chunk, Exec, Limits, LiveSandbox, Mount, Usage


class Listener(Protocol):
    """Somebody who serves connections made inside a sandbox."""

    async def attach(self, sock: socket.socket) -> None:
        """Accept connections from this listening socket until closed. Takes the socket over."""


class Process(Protocol):
    """A command under way in a sandbox."""

    def output(self) -> AsyncIterator[Chunk]:
        """Yield what it prints, as it comes, until it has ended. For one reader."""

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises SandboxError when that is closed."""

    async def end_input(self) -> None:
        """Close its standard input."""

    async def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it started; nothing once it has ended."""

    async def wait(self) -> int:
        """Return its exit code, 128 + n after signal n. Raises SandboxLostError."""


class Sandbox(Protocol):
    """One live isolated machine."""

    @property
    def id(self) -> str:
        """Identify the sandbox in logs and in the ledger."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes | None = None,
    ) -> Exec:
        """Run a command to its end; at the timeout its whole process tree is killed.

        `user` is `root`, or None for the sandbox's ordinary user.
        """

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command; leaving the context kills it and everything that it started."""

    async def read(self, path: str) -> bytes:
        """Return a file. Raises FileNotFoundError; a link never leads out of the sandbox."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its parents; a link never leads out of the sandbox."""

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there."""


@runtime_checkable
class MeteredSandbox(Protocol):
    """A Sandbox that can tell what it took."""

    async def usage(self) -> Usage:
        """Return what it took from its start on."""


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    def open(
        self,
        image: str,
        limits: Limits,
        *,
        workdir: str,
        mounts: Sequence[Mount] = (),
        name: str = "",
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Create a sandbox of `image`; leaving the context removes it whatever happened.

        `name` marks it at its provider from the first moment on, so that `live` and `remove` find
        it when its owner is dead; a fresh one is made where it is empty.
        """

    async def live(self) -> Sequence[LiveSandbox]:
        """Return the sandboxes of swerl's that the provider says exist, whoever opened them."""

    async def remove(self, name: str) -> None:
        """Remove the sandbox of this name and all that is left of it; nothing where none is."""

    def price(self, limits: Limits) -> float:
        """Return what such a sandbox costs, in US dollars an hour; 0 on one's own machine."""
