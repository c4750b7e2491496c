"""Which HTTP status a failure has; each vendor adds its own name for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swerl.core.chat import Json
from swerl.core.errors import (
    BudgetError,
    EngineError,
    GatewayError,
    InputError,
    Refusal,
    SwerlError,
)
from swerl.gateway.dialects._wire import NO_RETRY, RETRY_SOON

_REFUSED: Mapping[Refusal, int] = {
    Refusal.INVALID: 400,
    Refusal.AUTHENTICATION: 401,
    Refusal.NOT_FOUND: 404,
    Refusal.TOO_LARGE: 413,
    Refusal.CONTEXT: 400,
    Refusal.LIMIT: 400,
    Refusal.OVERLOADED: 503,
}
_OPENAI_TYPES: Mapping[int, str] = {500: "server_error", 503: "server_error", 504: "server_error"}
_OPENAI_CODES: Mapping[Refusal, str] = {
    Refusal.AUTHENTICATION: "invalid_api_key",
    Refusal.CONTEXT: "context_length_exceeded",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure as a client is told of it."""

    status: int
    message: str
    headers: Mapping[str, str]


def failure(error: Exception) -> Failure:
    """Say how a client hears of this error; what is none of its business stays unsaid."""
    if isinstance(error, GatewayError):
        headers = RETRY_SOON if error.refusal is Refusal.OVERLOADED else NO_RETRY
        return Failure(_REFUSED[error.refusal], str(error), headers)
    if isinstance(error, InputError):
        return Failure(400, str(error), NO_RETRY)
    if isinstance(error, BudgetError):
        return Failure(504, str(error), NO_RETRY)
    if isinstance(error, EngineError):
        headers = RETRY_SOON if error.retryable else NO_RETRY
        return Failure(503 if error.retryable else 500, f"the engine failed: {error}", headers)
    if isinstance(error, SwerlError):
        return Failure(500, str(error), NO_RETRY)
    return Failure(500, f"internal error: {type(error).__name__}", NO_RETRY)


def openai_error(error: Exception, failed: Failure) -> Json:
    """Build the body with which OpenAI's APIs tell of a failure."""
    refusal = error.refusal if isinstance(error, GatewayError) else None
    detail: Json = {
        "message": failed.message,
        "type": _OPENAI_TYPES.get(failed.status, "invalid_request_error"),
        "param": None,
        "code": _OPENAI_CODES.get(refusal) if refusal else None,
    }
    return {"error": detail}
