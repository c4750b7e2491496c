"""Check rights: the API key, sandbox tokens, user names."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping

from swerl.sandboxes.e2b_server.failure import Code, WireError

_KEY_PREFIX = "e2b_"
_ID_BYTES = 10
"""Sandbox ids are 20 lower-case hex digits: they are part of host names, where case is lost."""


def new_key() -> str:
    """Return an API key in the form that every SDK version accepts."""
    return _KEY_PREFIX + secrets.token_hex(20)


def new_sandbox_id() -> str:
    """Return an unguessable id that can be part of a host name."""
    return secrets.token_hex(_ID_BYTES)


def new_token() -> str:
    return secrets.token_urlsafe(32)


def same(candidate: str, expected: str) -> bool:
    """Compare two secrets in constant time, whatever their lengths."""
    first, second = (
        hashlib.sha256(text.encode(errors="replace")).digest() for text in (candidate, expected)
    )
    return hmac.compare_digest(first, second)


def require_key(headers: Mapping[str, str], key: str) -> None:
    """Raise WireError unless the request carries the API key, in either form that the SDKs use."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    by_header = same(headers.get("X-API-Key", ""), key)
    by_bearer = same(bearer if scheme.lower() == "bearer" else "", key)
    if not (by_header or by_bearer):
        raise WireError(Code.UNAUTHENTICATED, "the API key is missing or wrong")


def token_of(headers: Mapping[str, str]) -> str:
    """Return the token that opens a sandbox and everything in it; empty if the request has none."""
    return headers.get("X-Access-Token", "")


def traffic_token_of(headers: Mapping[str, str]) -> str:
    """Return the token that opens only the ports of a sandbox; empty if the request has none."""
    return headers.get("E2b-Traffic-Access-Token", "")


def user_of(headers: Mapping[str, str]) -> str | None:
    """Return the user of a request: `root`, or None for the sandbox's ordinary user.

    E2B's SDK sends the name as Basic authentication without a password. Raises WireError if it
    cannot be read.
    """
    scheme, _, encoded = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise WireError(Code.UNAUTHENTICATED, "the user name cannot be read") from error
    return inside_user(name.partition(":")[0])


def inside_user(name: str) -> str | None:
    """Return `root` for root, and None (the ordinary user) for every other name."""
    return "root" if name == "root" else None
