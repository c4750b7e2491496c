"""The e2b SDK's errors as ours, whatever release and transport they come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from swerl.core.errors import ImageError, SandboxError, SandboxLostError, SandboxUnavailableError
from swerl.core.sandbox import FROM_INSIDE

_TRANSPORT = {"httpx", "httpcore", "pyqwest", "connectrpc", "e2b_connect", "h11", "h2", "anyio"}
"""Packages whose errors mean that the connection failed, not that the server refused."""
_NO_BACKEND = 424
"""What a run's own server answers where its machine can hold no sandbox."""
_STATUS = re.compile(r"\b([1-5]\d\d): ")


class CutError(SandboxError):
    """The connection broke; what was under way may go on, or may never have begun."""

    retryable = True


class GoneError(SandboxError):
    """The provider says that there is no such sandbox, or no such command in it.

    A data plane may say so for a moment; the control plane's word counts.
    """

    retryable = True


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn what the SDK raises about this into our errors."""
    try:
        yield
    except (SandboxError, ImageError):
        raise
    except Exception as error:
        raise _translate(error, what) from error


def _translate(error: Exception, what: str) -> Exception:
    import e2b.exceptions as theirs

    name, said = type(error).__name__, str(error).strip()
    status, text = _status(error), said[:300]
    if FROM_INSIDE in said:
        is_lost = isinstance(error, theirs.NotFoundException | theirs.TimeoutException)
        kind = SandboxLostError if is_lost else SandboxError
        return kind(f"{what}: {text}", hint="open a fresh sandbox", from_inside=True)
    if name == "FileNotFoundException":
        return FileNotFoundError(text)
    if isinstance(error, theirs.AuthenticationException) or status in (401, 403):
        if "user" in text and "user" in what:
            return SandboxError(f"{what}: {text}", hint="name a user of the image")
        hint = "is E2B_API_KEY the key of this account, and api_url its server?"
        return SandboxUnavailableError(f"the provider refuses the key: {text}", hint=hint)
    if status == _NO_BACKEND:
        hint = "`swerl doctor` says there what the machine lacks"
        return SandboxUnavailableError(text, hint=hint)
    if isinstance(error, theirs.RateLimitException) or status == 429:
        hint = "lower create_concurrency or creates_per_s, or raise the account's limit"
        return SandboxError(f"{what}: the provider's rate is exceeded", hint=hint, retryable=True)
    if name in ("SandboxNotFoundException", "SandboxNotRunningException"):
        return GoneError(f"{what}: {text}")
    if isinstance(error, theirs.NotFoundException) or status == 404:
        if what.startswith("a sandbox of template"):
            return ImageError(f"{what}: {text}", hint="`e2b template list` shows the account's")
        return GoneError(f"{what}: {text}")
    if isinstance(error, theirs.NotEnoughSpaceException) or status == 507:
        return SandboxError(f"{what}: its disk is full", hint="raise disk_mib, or the template's")
    if isinstance(error, theirs.TimeoutException) or _is_connection(error):
        return CutError(f"{what}: {text or name}", hint="is the provider reachable?")
    if name == "ServiceBusyException" or (status or 0) >= 500:
        return CutError(f"{what}: the provider fails: {text}", hint="try again later")
    if name == "Exception" and "without an end event" in text:
        return CutError(f"{what}: its stream ended early", hint="is a proxy cutting it?")
    if what.startswith("a sandbox of template") and status == 400:
        return ImageError(f"{what}: {text}", hint="is the template's name right?")
    return SandboxError(f"{what}: {text or name}", hint="see the provider's own status and logs")


def _is_connection(error: Exception) -> bool:
    if isinstance(error, OSError | EOFError):
        return True
    return type(error).__module__.partition(".")[0] in _TRANSPORT


def _status(error: Exception) -> int | None:
    """Return the HTTP status behind an error; older releases only put it in the text."""
    known = getattr(error, "status_code", None)
    if isinstance(known, int):
        return known
    match = _STATUS.match(str(error))
    return int(match[1]) if match else None
