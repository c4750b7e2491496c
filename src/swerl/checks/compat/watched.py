"""A Sandbox whose commands run under watch: what they try to reach outside is written down."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from swerl.core.contracts import Listener, Process, Sandbox
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Exec

_PROGRAM = "/var/lib/swerl-lab/outside.py"
_LOG = "/var/lib/swerl-lab/outside.log"
_NAMES = "/etc/nsswitch.conf"
_ASK_DNS = b"passwd: files\ngroup: files\nhosts: files dns\n"
"""With `files` alone glibc would look a name up without asking anybody, and nobody would see it."""


class Watched:
    """Implements Sandbox over another one."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def id(self) -> str:
        """Identify the sandbox."""
        return self._sandbox.id

    async def prepare(self) -> None:
        """Bring the watch in. Raises SandboxError where it cannot run."""
        await self._sandbox.write(_PROGRAM, _source())
        await self._sandbox.write(_NAMES, _ASK_DNS)
        tried = await self.run(["true"], timeout_s=60)
        if tried.exit_code:
            raise SandboxError(
                f"connections cannot be watched: {tried.text.strip()[-200:]}",
                hint="it takes Linux 5.9 and Python 3 in the sandbox",
            )

    async def attempts(self) -> tuple[str, ...]:
        """Return what was tried to be reached, each once, in order."""
        log = (await self._sandbox.read(_LOG)).decode()
        return tuple(dict.fromkeys(log.splitlines()))

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
        """Run a command to its end, under watch."""
        return await self._sandbox.run(
            _under_watch(argv), cwd=cwd, env=env, user=user, timeout_s=timeout_s, stdin=stdin
        )

    def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command under watch."""
        return self._sandbox.start(_under_watch(argv), cwd=cwd, env=env, user=user)

    async def read(self, path: str) -> bytes:
        """Return a file."""
        return await self._sandbox.read(path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file."""
        await self._sandbox.write(path, data)

    async def expose(self, listener: Listener) -> str:
        """Make `listener` reachable from inside and return its base URL there."""
        return await self._sandbox.expose(listener)


def _under_watch(argv: Sequence[str]) -> list[str]:
    return ["python3", "-I", "-S", _PROGRAM, _LOG, *argv]


def _source() -> bytes:
    found = importlib.util.find_spec("swerl.checks.compat.outside")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_bytes()
