"""Errors of requests: one code, in two shapes on the wire."""

from __future__ import annotations

import errno
from enum import StrEnum

from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import (
    ImageError,
    InputError,
    SandboxError,
    SandboxFileError,
    SandboxLostError,
    SwerlError,
)
from swerl.core.sandbox import FROM_INSIDE


class Code(StrEnum):
    """Error codes of the Connect protocol that this server uses."""

    CANCELED = "canceled"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    UNAUTHENTICATED = "unauthenticated"


_STATUS = {
    Code.CANCELED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}
_GONE_STATUS = 502
_NO_SPACE_STATUS = 507


class WireError(SwerlError):
    """An error that is the answer to a request."""

    def __init__(self, code: Code, message: str, *, status: int = 0, about: str = "") -> None:
        # Headers and addresses may hold bytes that are no text, which JSON cannot carry.
        super().__init__(message.encode(errors="replace").decode())
        self.code = code
        self.status = status or _STATUS[code]
        self.about = about.encode(errors="replace").decode()
        """Id of the sandbox, if the reason is that it is gone."""

    def rest(self) -> dict[str, Json]:
        """Return the body in the shape of E2B's REST interfaces."""
        body: dict[str, Json] = {"code": self.status, "message": str(self)}
        return {**body, "sandboxId": self.about} if self.about else body

    def rpc(self) -> dict[str, Json]:
        """Return the body in the shape of the Connect protocol."""
        return {"code": self.code.value, "message": str(self)}


def gone(sandbox_id: str, *, from_inside: bool = False) -> WireError:
    """Return the error that marks a sandbox as gone for the SDK."""
    message = "The sandbox was not found" + why(from_inside)
    return WireError(Code.UNAVAILABLE, message, status=_GONE_STATUS, about=sandbox_id)


def why(from_inside: bool) -> str:
    """Return the words that a message adds if a program inside the sandbox is the cause."""
    return f": {FROM_INSIDE}" if from_inside else ""


def as_failure(error: Exception) -> WireError:
    """Return the answer to an error. A foreign error reveals its type alone."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, web.RequestPayloadError):  # its Content-Encoding or framing is wrong
        return WireError(Code.INVALID_ARGUMENT, f"the body cannot be read: {error}")
    if isinstance(error, FileNotFoundError):
        return WireError(Code.NOT_FOUND, f"path not found: {error.filename or error}")
    if isinstance(error, SandboxLostError):
        return gone("", from_inside=error.from_inside)
    if not isinstance(error, SwerlError):
        return WireError(Code.INTERNAL, f"the server failed: {type(error).__name__}")
    text = f"{error} ({error.hint})" if error.hint else str(error)
    if isinstance(error, SandboxError) and not isinstance(error, SandboxFileError):
        text += why(error.from_inside)
    if isinstance(error, ImageError):
        return WireError(Code.NOT_FOUND, text)
    if isinstance(error, InputError):
        return WireError(Code.INVALID_ARGUMENT, text)
    return _from_cause(error.__cause__, text)


def _from_cause(cause: BaseException | None, text: str) -> WireError:
    """Distinguish a full disk, a folder and a forbidden path from other errors of a sandbox."""
    if not isinstance(cause, OSError):
        return WireError(Code.INTERNAL, text)
    if cause.errno == errno.ENOSPC:
        return WireError(Code.RESOURCE_EXHAUSTED, text, status=_NO_SPACE_STATUS)
    if cause.errno in (errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG):
        return WireError(Code.INVALID_ARGUMENT, text)
    if cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return WireError(Code.PERMISSION_DENIED, text)
    return WireError(Code.INTERNAL, text)
