"""Reading the fields of a JSON message; a field of the wrong type is the client's mistake."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from swerl.core.chat import Json
from swerl.sandboxes.e2b_server.failure import Code, Failure

Message = Mapping[str, Json]


def text(message: Message, name: str, default: str = "") -> str:
    """Return a string field."""
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(name, "a text without NUL characters")
    return value


def flag(message: Message, name: str, default: bool = False) -> bool:
    """Return a field that is true or false."""
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def integer(message: Message, name: str, default: int = 0) -> int:
    """Return a whole number, which JSON may carry as a text too."""
    value = message.get(name)
    if value is None:
        return default
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "a whole number")
    return value


def texts(message: Message, name: str) -> list[str]:
    """Return a list of strings."""
    value = message.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, "a list of texts")
    return [text({name: item}, name) for item in value]


def table(message: Message, name: str) -> dict[str, str]:
    """Return an object of strings."""
    return {key: text(part(message, name), key) for key in part(message, name)}


def part(message: Message, name: str) -> Message:
    """Return an object inside a message; an absent one is empty."""
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(name, "an object")
    return value


def data(message: Message, name: str) -> bytes:
    """Return bytes, which JSON carries in base64, in either alphabet."""
    given = text(message, name)
    try:
        return base64.b64decode(given.replace("-", "+").replace("_", "/") + "==")
    except binascii.Error as error:
        raise _wrong(name, "base64") from error


def _wrong(name: str, wanted: str) -> Failure:
    return Failure(Code.INVALID_ARGUMENT, f"field {name!r} must be {wanted}")
