"""The only file that calls the e2b SDK, and knows how releases of it differ.

It works with 2.25 and 2.63 alike: what only one of them takes is looked up in its own signatures.
The SDK is imported where it is used, so that the rest of swerl needs none.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import IO, Any

from swerl.core.errors import SandboxLostError, SandboxUnavailableError
from swerl.sandboxes._e2b.errors import GoneError, translated

_UPLOAD_TIMEOUT_S = 600.0

Show = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the provider."""

    api_key: str
    api_url: str | None
    sandbox_url: str | None
    domain: str | None
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """A sandbox that the provider lists."""

    id: str
    template: str
    metadata: Mapping[str, str]
    started_unix_s: float


def require() -> None:
    """Raise SandboxUnavailableError where the SDK is not installed."""
    try:
        import e2b  # noqa: F401
    except ImportError as error:
        raise SandboxUnavailableError(
            "the package e2b is not installed", hint="pip install 'swerl[e2b]'"
        ) from error


class Provider:
    """The control plane: creates, lists and kills sandboxes."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def create(
        self, template: str, *, lifetime_s: float, metadata: Mapping[str, str], reach: Sequence[str]
    ) -> Machine:
        """Create a sandbox that may reach these outside hosts. Raises ImageError for a template
        that is not there."""
        from e2b import AsyncSandbox

        network = {"deny_out": ["0.0.0.0/0"], "allow_out": list(reach)} if reach else None
        with translated(f"a sandbox of template {template!r}"):
            made = await AsyncSandbox.create(
                template=template,
                timeout=max(1, math.ceil(lifetime_s)),
                metadata=dict(metadata),
                secure=True,
                **({"network": network} if network else {"allow_internet_access": False}),
                **self._parameters(),
            )
        return Machine(made)

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox; nothing where it is gone."""
        from e2b import AsyncSandbox

        try:
            with translated(f"sandbox {sandbox_id}"):
                await AsyncSandbox.kill(sandbox_id, **self._parameters())
        except (GoneError, SandboxLostError):
            return

    async def exists(self, sandbox_id: str) -> bool:
        """Say whether the provider still has this sandbox.

        Raises CutError where it is silent, SandboxLostError where it says that what ran inside is
        why it has not.
        """
        from e2b import AsyncSandbox

        try:
            with translated(f"sandbox {sandbox_id}"):
                await AsyncSandbox.get_info(sandbox_id, **self._parameters())
        except GoneError:
            return False
        return True

    async def find(self, metadata: Mapping[str, str]) -> list[Found]:
        """Return the sandboxes with all of this metadata."""
        from e2b import AsyncSandbox, SandboxQuery

        found = []
        with translated("the list of sandboxes"):
            pages = AsyncSandbox.list(SandboxQuery(metadata=dict(metadata)), **self._parameters())
            while pages.has_next:
                found += [_found(item) for item in await pages.next_items()]
        # Gateways that imitate the service may leave the filter out.
        return [each for each in found if metadata.items() <= each.metadata.items()]

    def _parameters(self) -> dict[str, Any]:
        from e2b.connection_config import ApiParams

        access = self._access
        wanted: dict[str, Any] = {
            "api_key": access.api_key,
            "request_timeout": access.request_timeout_s,
            "debug": False,
            "retries": 0,  # swerl retries, with one limit over all attempts
        }
        for name in ("api_url", "sandbox_url", "domain"):
            if value := getattr(access, name):
                wanted[name] = value
        known = ApiParams.__annotations__
        return {name: value for name, value in wanted.items() if name in known}


class Machine:
    """The data plane of one sandbox: commands and files."""

    def __init__(self, made: Any) -> None:
        self.id: str = made.sandbox_id
        self._made = made

    @asynccontextmanager
    async def shell(
        self,
        script: str,
        *,
        env: Mapping[str, str],
        user: str | None,
        takes_input: bool,
        show: Sequence[Show],
    ) -> AsyncIterator[Shell]:
        """Run a shell script; `show` gets its standard output and its errors as they come.

        Leaving the context closes the stream and kills nothing. Raises CutError and GoneError.
        """
        run = self._made.commands.run
        options: dict[str, Any] = {"retain_output": False}
        with self._errors(user):
            handle = await run(
                script,
                background=True,
                envs=dict(env),
                user=user,
                cwd="/",
                stdin=takes_input,
                timeout=0,
                on_stdout=show[0],
                on_stderr=show[1],
                **{name: each for name, each in options.items() if _takes(run, name)},
            )
        try:
            yield Shell(self._made, handle, self.id)
        finally:
            await handle.disconnect()

    async def read(self, path: str) -> bytes:
        """Return a file, as root."""
        with self._errors("root"):
            read = self._made.files.read
            data = await read(path, format="bytes", user="root", request_timeout=_UPLOAD_TIMEOUT_S)
            return bytes(data)

    async def write(self, path: str, data: bytes | IO[bytes], user: str | None) -> None:
        """Write a file, without a copy in memory where the release of the SDK can."""
        write = self._made.files.write
        options: dict[str, Any] = {"use_octet_stream": True}
        with self._errors(user):
            await write(
                path,
                data,
                user=user,
                request_timeout=_UPLOAD_TIMEOUT_S,
                **{name: each for name, each in options.items() if _takes(write, name)},
            )

    def _errors(self, user: str | None) -> AbstractContextManager[None]:
        return translated(f"sandbox {self.id}" + (f", user {user!r}" if user else ""))


@dataclass(frozen=True, slots=True)
class Shell:
    """A shell script under way."""

    made: Any
    handle: Any
    sandbox_id: str

    async def send(self, text: str) -> None:
        """Write to its standard input; waits as long as nobody reads it."""
        with translated(f"input to a command in sandbox {self.sandbox_id}"):
            await self.made.commands.send_stdin(self.handle.pid, text, request_timeout=0)

    async def wait(self) -> None:
        """Wait for its end. Raises CutError where the stream ends before it does."""
        from e2b import CommandExitException

        with translated(f"a command in sandbox {self.sandbox_id}"):
            try:
                await self.handle.wait()
            except CommandExitException:
                return


def _takes(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _found(item: Any) -> Found:
    return Found(
        id=item.sandbox_id,
        template=item.name or item.template_id,
        metadata=dict(item.metadata or {}),
        started_unix_s=item.started_at.timestamp(),
    )
