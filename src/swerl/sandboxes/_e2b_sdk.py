"""The only file that calls the e2b SDK. All errors are swerl's own.

The functions that use the SDK import it, so the rest of swerl does not need it.
"""

from __future__ import annotations

import codecs
import math
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from swerl.core.errors import (
    ImageError,
    SandboxError,
    SandboxUnavailableError,
    install_command,
)

_TRANSFER_TIMEOUT_S = 600.0
_TRANSPORT = {"httpx", "httpcore", "pyqwest", "connectrpc", "e2b_connect", "h11", "h2", "anyio"}
"""Packages whose errors mean that the connection failed, not that the server refused."""
_NO_BACKEND = 424
"""Status of a run's own server if its machine cannot run sandboxes."""

Stream = Callable[[bytes], Awaitable[None]]
"""Receives the output of a command as it arrives."""


class CutError(SandboxError):
    """The connection broke; the request may be running, or may never have started."""

    retryable = True


class GoneError(CutError):
    """The provider reports that there is no such sandbox, or no such command in it.

    A data plane may report this temporarily; only the control plane's report counts.
    """


@dataclass(frozen=True, slots=True)
class ListedSandbox:
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
            "the package e2b is not installed", hint=install_command("e2b")
        ) from error


class E2BProvider:
    """The control plane: creates, lists and kills sandboxes."""

    def __init__(
        self, api_key: str, request_timeout_s: float, addresses: Mapping[str, str]
    ) -> None:
        """`addresses`: the SDK's `api_url`, `sandbox_url` and `domain`, those that are set."""
        self._parameters: dict[str, Any] = {
            "api_key": api_key,
            "request_timeout": request_timeout_s,
            "debug": False,
            "retries": 0,  # swerl retries, with one limit for all attempts
            **addresses,
        }

    async def create(
        self, template: str, *, lifetime_s: float, metadata: Mapping[str, str]
    ) -> RemoteSandbox:
        """Create a sandbox without internet access. Raises ImageError without such a template."""
        from e2b import AsyncSandbox

        with translated(f"a sandbox of template {template!r}"):
            sandbox = await AsyncSandbox.create(
                template=template,
                timeout=max(1, math.ceil(lifetime_s)),
                metadata=dict(metadata),
                secure=True,
                allow_internet_access=False,
                **self._parameters,
            )
        return RemoteSandbox(sandbox)

    async def kill(self, sandbox_id: str) -> None:
        """Kill a sandbox, if it exists."""
        from e2b import AsyncSandbox

        try:
            with translated(f"sandbox {sandbox_id}"):
                await AsyncSandbox.kill(sandbox_id, **self._parameters)
        except GoneError:
            return

    async def exists(self, sandbox_id: str) -> bool:
        """Return whether the provider still has this sandbox.

        Raises CutError if it does not answer.
        """
        from e2b import AsyncSandbox

        try:
            with translated(f"sandbox {sandbox_id}"):
                await AsyncSandbox.get_info(sandbox_id, **self._parameters)
        except GoneError:
            return False
        return True

    async def find(self, metadata: Mapping[str, str]) -> list[ListedSandbox]:
        """Return the sandboxes with all of this metadata."""
        from e2b import AsyncSandbox, SandboxQuery

        sandboxes = []
        with translated("the list of sandboxes"):
            pages = AsyncSandbox.list(SandboxQuery(metadata=dict(metadata)), **self._parameters)
            while pages.has_next:
                for item in await pages.next_items():
                    template = item.name or item.template_id
                    started = item.started_at.timestamp()
                    listed = dict(item.metadata or {})
                    if metadata.items() <= listed.items():  # some services ignore the filter
                        sandboxes.append(ListedSandbox(item.sandbox_id, template, listed, started))
        return sandboxes


class RemoteSandbox:
    """The data plane of one sandbox: commands and files."""

    def __init__(self, sandbox: Any) -> None:
        self.id: str = sandbox.sandbox_id
        self._sandbox = sandbox

    async def start(
        self,
        script: str,
        *,
        user: str | None,
        takes_input: bool,
        streams: tuple[Stream, Stream],
    ) -> RemoteCommand:
        """Start a shell script; `streams` receive its output and its errors."""
        with translated(f"sandbox {self.id}" + (f", user {user!r}" if user else "")):
            handle = await self._sandbox.commands.run(
                script,
                background=True,
                user=user,
                cwd="/",
                stdin=takes_input,
                timeout=0,
                on_stdout=_encoding(streams[0]),
                on_stderr=_encoding(streams[1]),
                retain_output=False,
            )
        # The SDK decodes output as UTF-8, which loses other bytes. No event was handled yet.
        for name in ("_stdout_decoder", "_stderr_decoder"):
            if not hasattr(handle, name):
                message = "this release of the package e2b decodes output in another way"
                raise SandboxUnavailableError(message, hint="pip install 'e2b==2.63.0'")
            setattr(handle, name, codecs.getincrementaldecoder("latin-1")())
        return RemoteCommand(handle, self.id)

    async def download(self, path: str) -> bytes:
        """Return a file, read as root."""
        with translated(f"sandbox {self.id}, user 'root'"):
            read = self._sandbox.files.read
            timeout_s = _TRANSFER_TIMEOUT_S
            return bytes(await read(path, format="bytes", user="root", request_timeout=timeout_s))

    async def upload(self, path: str, file: IO[bytes]) -> None:
        """Write a file as root, without a copy of it in memory."""
        with translated(f"sandbox {self.id}, user 'root'"):
            write = self._sandbox.files.write
            await write(path, file, user="root", request_timeout=_TRANSFER_TIMEOUT_S)


class RemoteCommand:
    """A running command. All methods raise CutError if the connection breaks."""

    def __init__(self, handle: Any, sandbox_id: str) -> None:
        self.pid: int = handle.pid
        self._handle = handle
        self._what = f"a command in sandbox {sandbox_id}"

    async def send(self, data: bytes) -> None:
        """Write to its standard input; waits until the data is read."""
        with translated(self._what):
            await self._handle.send_stdin(data, request_timeout=0)

    async def end_input(self) -> None:
        with translated(self._what):
            await self._handle.close_stdin()

    async def kill(self) -> None:
        with translated(self._what):
            await self._handle.kill()

    async def disconnect(self) -> None:
        await self._handle.disconnect()

    async def wait(self) -> int:
        """Wait for its end; return its exit code, or 128 + n after signal n."""
        from e2b import CommandExitException

        with translated(self._what):
            try:
                await self._handle.wait()
            except CommandExitException as error:
                return _exit_code(error.exit_code, error.error or "")
        return 0


def _encoding(stream: Stream) -> Callable[[str], Awaitable[None]]:
    """Return a stream that receives text in which each character is a byte."""
    return lambda text: stream(text.encode("latin-1"))


def _exit_code(code: int, detail: str) -> int:
    """Return a command's exit code; after a signal, the provider reports -1 and the signal's
    name."""
    for number in signal.Signals:
        name = signal.strsignal(number)
        if code == -1 and name and f"signal: {name.lower()}" in detail:
            return 128 + number
    return code


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

    detail = str(error).strip()
    text = f"{what}: {detail[:300] or type(error).__name__}"
    status = getattr(error, "status_code", None) or 0
    is_create = what.startswith("a sandbox of template")
    if isinstance(error, theirs.FileNotFoundException):
        return FileNotFoundError(text)
    if isinstance(error, theirs.AuthenticationException) or status in (401, 403):
        if "user" in detail and "user" in what:
            return SandboxError(text, hint="name a user of the image")
        hint = f"check that E2B_API_KEY is this account's key, and api_url its server: {detail}"
        return SandboxUnavailableError("the provider refuses the key", hint=hint[:300])
    if status == _NO_BACKEND:
        return SandboxUnavailableError(text, hint="run `swerl doctor` on that machine")
    if status == 429 or isinstance(error, theirs.RateLimitException):
        hint = "lower creates_per_s or rollout.concurrency, or raise the account's limit"
        return SandboxError(text, hint=hint, retryable=True)
    if status == 404 or isinstance(error, theirs.NotFoundException):
        hint = "`e2b template list` prints the templates"
        return ImageError(text, hint=hint) if is_create else GoneError(text)
    if status in (413, 507) or isinstance(error, theirs.NotEnoughSpaceException):
        return SandboxError(text, hint="raise disk_mib, or the template's disk", from_inside=True)
    if is_create and status == 400 and "timeout" in detail.lower():
        hint = "lower budgets.sandbox_s: the account's plan limits a sandbox's life"
        return SandboxUnavailableError(text, hint=hint)
    if is_create and status == 400:
        return ImageError(text, hint="check the template's name")
    is_cut = isinstance(error, theirs.TimeoutException | OSError | EOFError) or status >= 500
    transport = type(error).__module__.partition(".")[0]
    if is_cut or transport in _TRANSPORT or "without an end event" in detail:
        return CutError(text, hint="check that the provider is reachable")
    return SandboxError(text, hint="see the provider's status and logs")
