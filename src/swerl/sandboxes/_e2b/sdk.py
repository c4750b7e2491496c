"""The only file that calls the e2b SDK; handles differences between its releases.

It works with 2.25 and 2.63: parameters that only one of them accepts are looked up in its
signatures. The functions that use the SDK import it, so the rest of swerl does not need it. All
errors are swerl's own, for every release and transport.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from typing import IO, Any, Protocol

from swerl.core.errors import ImageError, SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import FROM_INSIDE

_UPLOAD_TIMEOUT_S = 600.0
_TRANSPORT = {"httpx", "httpcore", "pyqwest", "connectrpc", "e2b_connect", "h11", "h2", "anyio"}
"""Packages whose errors mean that the connection failed, not that the server refused."""
_NO_BACKEND = 424
"""Status of a run's own server if its machine cannot run sandboxes."""
_STATUS = re.compile(r"\b([1-5]\d\d): ")

Show = Callable[[str], Awaitable[None]]


class CutError(SandboxError):
    """The connection broke; the request may be running, or may never have started."""

    retryable = True


class GoneError(SandboxError):
    """The provider reports that there is no such sandbox, or no such command in it.

    A data plane may report this temporarily; only the control plane's report counts.
    """

    retryable = True


class Way(Protocol):
    """A way to a server to which the SDK cannot connect."""

    url: str
    """Where the SDK connects instead, while the way is open."""

    def opened(self) -> AbstractAsyncContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class E2BAccess:
    """Addresses and key of the provider."""

    api_key: str
    api_url: str | None
    sandbox_url: str | None
    domain: str | None
    request_timeout_s: float
    way: Way | None = None

    @property
    def url(self) -> str | None:
        """The control plane's URL as this process reaches it."""
        return self.way.url if self.way else self.api_url

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Keep the way to the server open."""
        return self.way.opened() if self.way else nullcontext()


@dataclass(frozen=True, slots=True)
class FoundSandbox:
    """A sandbox that the provider lists."""

    id: str
    template: str
    metadata: Mapping[str, str]
    started_unix_s: float


def require() -> None:
    """Raise SandboxUnavailableError if the SDK is not installed."""
    try:
        import e2b  # noqa: F401
    except ImportError as error:
        raise SandboxUnavailableError(
            "the package e2b is not installed", hint="pip install 'swerl[e2b]'"
        ) from error


class E2BProvider:
    """The control plane: creates, lists and kills sandboxes."""

    def __init__(self, access: E2BAccess) -> None:
        self._access = access

    async def create(
        self, template: str, *, lifetime_s: float, metadata: Mapping[str, str], reach: Sequence[str]
    ) -> RemoteSandbox:
        """Create a sandbox that may reach these outside hosts. Raises ImageError if there is no
        such template."""
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
        return RemoteSandbox(made)

    async def kill(self, sandbox_id: str) -> None:
        from e2b import AsyncSandbox

        try:
            with translated(f"sandbox {sandbox_id}"):
                await AsyncSandbox.kill(sandbox_id, **self._parameters())
        except (GoneError, SandboxLostError):
            return

    async def exists(self, sandbox_id: str) -> bool:
        """Return whether the provider still has this sandbox.

        Raises CutError if it does not answer, and SandboxLostError if it reports that a process
        inside ended the sandbox.
        """
        from e2b import AsyncSandbox

        try:
            with translated(f"sandbox {sandbox_id}"):
                await AsyncSandbox.get_info(sandbox_id, **self._parameters())
        except GoneError:
            return False
        return True

    async def find(self, metadata: Mapping[str, str]) -> list[FoundSandbox]:
        """Return the sandboxes with all of this metadata."""
        from e2b import AsyncSandbox, SandboxQuery

        found = []
        with translated("the list of sandboxes"):
            pages = AsyncSandbox.list(SandboxQuery(metadata=dict(metadata)), **self._parameters())
            while pages.has_next:
                found += [_found(item) for item in await pages.next_items()]
        # compatible services may ignore the filter
        return [each for each in found if metadata.items() <= each.metadata.items()]

    def _parameters(self) -> dict[str, Any]:
        from e2b.connection_config import ApiParams

        access = self._access
        wanted: dict[str, Any] = {
            "api_key": access.api_key,
            "request_timeout": access.request_timeout_s,
            "debug": False,
            "retries": 0,  # swerl retries, with one limit for all attempts
        }
        addresses = {
            "api_url": access.url,
            "sandbox_url": access.way.url if access.way else access.sandbox_url,
            "domain": access.domain,
        }
        wanted |= {name: value for name, value in addresses.items() if value}
        known = ApiParams.__annotations__
        return {name: value for name, value in wanted.items() if name in known}


class RemoteSandbox:
    """The data plane of one sandbox: commands and files."""

    def __init__(self, made: Any) -> None:
        self.id: str = made.sandbox_id
        self._made = made

    @property
    def token(self) -> str:
        """Token that opens this sandbox alone; empty if the provider gave none."""
        return getattr(self._made, "_envd_access_token", None) or ""

    @asynccontextmanager
    async def shell(
        self,
        script: str,
        *,
        env: Mapping[str, str],
        user: str | None,
        accepts_input: bool,
        show: Sequence[Show],
    ) -> AsyncIterator[ShellStream]:
        """Run a shell script; `show` receives its standard output and standard error.

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
                stdin=accepts_input,
                timeout=0,
                on_stdout=show[0],
                on_stderr=show[1],
                **{name: each for name, each in options.items() if _accepts(run, name)},
            )
        try:
            yield ShellStream(self._made, handle, self.id)
        finally:
            await handle.disconnect()

    async def read(self, path: str) -> bytes:
        with self._errors("root"):
            read = self._made.files.read
            data = await read(path, format="bytes", user="root", request_timeout=_UPLOAD_TIMEOUT_S)
            return bytes(data)

    async def write(self, path: str, data: bytes | IO[bytes], user: str | None) -> None:
        """Write a file, without a copy in memory if the SDK's release supports it."""
        write = self._made.files.write
        options: dict[str, Any] = {"use_octet_stream": True}
        with self._errors(user):
            await write(
                path,
                data,
                user=user,
                request_timeout=_UPLOAD_TIMEOUT_S,
                **{name: each for name, each in options.items() if _accepts(write, name)},
            )

    def _errors(self, user: str | None) -> AbstractContextManager[None]:
        return translated(f"sandbox {self.id}" + (f", user {user!r}" if user else ""))


@dataclass(frozen=True, slots=True)
class ShellStream:
    """A running shell script."""

    made: Any
    handle: Any
    sandbox_id: str

    async def send(self, text: str) -> None:
        """Write to its standard input; waits until the data is read."""
        with translated(f"input to a command in sandbox {self.sandbox_id}"):
            await self.made.commands.send_stdin(self.handle.pid, text, request_timeout=0)

    async def wait(self) -> None:
        """Wait for its end. Raises CutError if the stream ends before it does."""
        from e2b import CommandExitException

        with translated(f"a command in sandbox {self.sandbox_id}"):
            try:
                await self.handle.wait()
            except CommandExitException:
                return


def _accepts(function: Any, name: str) -> bool:
    return name in inspect.signature(function).parameters


def _found(item: Any) -> FoundSandbox:
    return FoundSandbox(
        id=item.sandbox_id,
        template=item.name or item.template_id,
        metadata=dict(item.metadata or {}),
        started_unix_s=item.started_at.timestamp(),
    )


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Translate the SDK's errors; `what` is the subject of their messages."""
    try:
        yield
    except (SandboxError, ImageError):
        raise
    except Exception as error:
        raise _translate(error, what) from error


def _translate(error: Exception, what: str) -> Exception:
    import e2b.exceptions as theirs

    name, detail = type(error).__name__, str(error).strip()
    status, text = _status(error), detail[:300]
    if FROM_INSIDE in detail:
        is_lost = isinstance(error, theirs.NotFoundException | theirs.TimeoutException)
        kind = SandboxLostError if is_lost else SandboxError
        return kind(f"{what}: {text}", hint="open a new sandbox", from_inside=True)
    if name == "FileNotFoundException":
        return FileNotFoundError(text)
    if isinstance(error, theirs.AuthenticationException) or status in (401, 403):
        if "user" in text and "user" in what:
            return SandboxError(f"{what}: {text}", hint="name a user of the image")
        hint = "check that E2B_API_KEY is this account's key, and api_url its server"
        return SandboxUnavailableError(f"the provider refuses the key: {text}", hint=hint)
    if status == _NO_BACKEND:
        hint = "run `swerl doctor` on that machine"
        return SandboxUnavailableError(text, hint=hint)
    if isinstance(error, theirs.RateLimitException) or status == 429:
        hint = "lower create_concurrency or creates_per_s, or raise the account's limit"
        return SandboxError(f"{what}: the provider's rate is exceeded", hint=hint, retryable=True)
    if name in ("SandboxNotFoundException", "SandboxNotRunningException"):
        return GoneError(f"{what}: {text}")
    if isinstance(error, theirs.NotFoundException) or status == 404:
        if what.startswith("a sandbox of template"):
            return ImageError(f"{what}: {text}", hint="`e2b template list` prints the templates")
        return GoneError(f"{what}: {text}")
    if isinstance(error, theirs.NotEnoughSpaceException) or status == 507:
        hint = "raise disk_mib, or the template's disk"
        return SandboxError(f"{what}: its disk is full", hint=hint, from_inside=True)
    if isinstance(error, theirs.TimeoutException) or _is_connection(error):
        return CutError(f"{what}: {text or name}", hint="check that the provider is reachable")
    if name == "ServiceBusyException" or (status or 0) >= 500:
        return CutError(f"{what}: the provider fails: {text}", hint="try again later")
    if name == "Exception" and "without an end event" in text:
        return CutError(f"{what}: its stream ended early", hint="a proxy may have closed it")
    if what.startswith("a sandbox of template") and status == 400:
        return ImageError(f"{what}: {text}", hint="check the template's name")
    return SandboxError(f"{what}: {text or name}", hint="see the provider's status and logs")


def _is_connection(error: Exception) -> bool:
    if isinstance(error, OSError | EOFError):
        return True
    return type(error).__module__.partition(".")[0] in _TRANSPORT


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error; older releases have it in the text only."""
    known = getattr(error, "status_code", None)
    if isinstance(known, int):
        return known
    match = _STATUS.match(str(error))
    return int(match[1]) if match else None
