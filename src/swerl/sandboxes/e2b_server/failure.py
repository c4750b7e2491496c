"""Errors of requests: one code, in two shapes on the wire."""

from __future__ import annotations

from enum import Enum

from aiohttp import web

from swerl.core.chat import Json
from swerl.core.errors import (
    ImageError,
    InputError,
    SandboxFileError,
    SandboxLostError,
    SwerlError,
)


class Code(Enum):
    """Error codes of the Connect protocol that this server uses, each with its HTTP status."""

    CANCELED = "canceled", 499
    INVALID_ARGUMENT = "invalid_argument", 400
    DEADLINE_EXCEEDED = "deadline_exceeded", 504
    NOT_FOUND = "not_found", 404
    ALREADY_EXISTS = "already_exists", 409
    PERMISSION_DENIED = "permission_denied", 403
    RESOURCE_EXHAUSTED = "resource_exhausted", 429
    UNIMPLEMENTED = "unimplemented", 501
    INTERNAL = "internal", 500
    UNAVAILABLE = "unavailable", 503
    UNAUTHENTICATED = "unauthenticated", 401


_GONE_STATUS = 502


class WireError(SwerlError):
    """An error that is the answer to a request."""

    def __init__(self, code: Code, message: str, *, status: int = 0, about: str = "") -> None:
        # Headers and addresses may contain bytes that are no text, which JSON cannot carry.
        super().__init__(message.encode(errors="replace").decode())
        self.code = code
        self.status = status or code.value[1]
        self.about = about.encode(errors="replace").decode()
        """Id of the sandbox, if the reason is that it is gone."""

    def rest(self) -> dict[str, Json]:
        """Return the body in the shape of E2B's REST interfaces."""
        body: dict[str, Json] = {"code": self.status, "message": str(self)}
        return {**body, "sandboxId": self.about} if self.about else body

    def rpc(self) -> dict[str, Json]:
        """Return the body in the shape of the Connect protocol."""
        return {"code": self.code.value[0], "message": str(self)}


def gone(sandbox_id: str) -> WireError:
    """Return the error that marks a sandbox as gone for the SDK."""
    message = "The sandbox was not found"
    return WireError(Code.UNAVAILABLE, message, status=_GONE_STATUS, about=sandbox_id)


def as_failure(error: Exception) -> WireError:
    """Return the answer to an error; of a foreign error, the client learns only its type."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, web.RequestPayloadError):  # its Content-Encoding or framing is wrong
        return WireError(Code.INVALID_ARGUMENT, f"the body cannot be read: {error}")
    if isinstance(error, SandboxLostError):
        return gone("")
    if not isinstance(error, SwerlError):
        return WireError(Code.INTERNAL, f"the server failed: {type(error).__name__}")
    text = error.explained()
    if isinstance(error, ImageError):
        return WireError(Code.NOT_FOUND, text)
    if isinstance(error, InputError | SandboxFileError):
        return WireError(Code.INVALID_ARGUMENT, text)
    return WireError(Code.INTERNAL, text)
