"""Check rights: API keys, sandbox tokens, signed file addresses, user names, certificates."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from swerl.core.errors import GatewayError
from swerl.sandboxes.e2b_server.failure import Code, WireError

_KEY_PREFIX = "e2b_"
_ID_BYTES = 10
"""Sandbox ids are 20 lower-case hex digits: they are part of host names, where case is lost."""


def new_key() -> str:
    """Return an API key in the form that every SDK version accepts."""
    return _KEY_PREFIX + secrets.token_hex(20)


def make_certificate(path: Path) -> None:
    """Write a key and a certificate signed by it to a file that only its owner may read.

    Raises GatewayError without the program openssl.
    """
    names = ("-subj", "/CN=swerl sandbox server", "-days", "3650")
    new = ("req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder, "key"), Path(folder, "certificate")
        argv = ["openssl", *new, *names, "-keyout", str(key), "-out", str(certificate)]
        try:
            subprocess.run(argv, check=True, capture_output=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(key.read_bytes() + certificate.read_bytes())
            Path(file.name).rename(path)
        except (OSError, subprocess.CalledProcessError) as error:
            message = f"cannot make a certificate at {path}: {error}"
            hint = "install openssl, or give a PEM file of a key and its certificate"
            raise GatewayError(message, hint=hint) from error


def tls_context(path: Path) -> ssl.SSLContext:
    """Return the server's side of TLS for a file of a key and its certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(path)
    except OSError as error:  # ssl.SSLError is one
        message = f"cannot read a key and its certificate in {path}: {error}"
        hint = "both are PEM, the key first; see `openssl req -help`"
        raise GatewayError(message, hint=hint) from error
    return context


def fingerprint_of(path: Path) -> str:
    """Return the SHA-256 of the first certificate in a PEM file, by which clients know it."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    body = path.read_text().partition(begin)[2].partition(end)[0]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(f"{begin}{body}{end}")).hexdigest()


def new_sandbox_id() -> str:
    """Return an unguessable id that can be part of a host name."""
    return secrets.token_hex(_ID_BYTES)


def new_token() -> str:
    return secrets.token_urlsafe(32)


def same(given: str, expected: str) -> bool:
    """Compare two secrets in constant time, whatever their lengths."""
    digests = (hashlib.sha256(text.encode(errors="replace")).digest() for text in (given, expected))
    return hmac.compare_digest(*digests)


def require_key(headers: Mapping[str, str], key: str) -> None:
    """Raise WireError unless the request carries the API key, in either form that the SDKs use."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    candidates = [headers.get("X-API-Key", ""), bearer if scheme.lower() == "bearer" else ""]
    if not any([same(candidate, key) for candidate in candidates]):  # noqa: C419  constant time
        raise WireError(Code.UNAUTHENTICATED, "the API key is missing or wrong")


def token_of(headers: Mapping[str, str]) -> str:
    """Return the token that opens a sandbox and everything in it; empty if the request has none."""
    return headers.get("X-Access-Token", "")


def traffic_token_of(headers: Mapping[str, str]) -> str:
    """Return the token that opens only the ports of a sandbox; empty if the request has none."""
    return headers.get("E2b-Traffic-Access-Token", "")


def signature(path: str, operation: str, user: str, token: str, expires: str) -> str:
    """Return the signature of a file address: version 1 of E2B's scheme, SHA-256.

    `expires` is a Unix time as text, or empty if the address does not expire.
    """
    parts = [path, operation, user, token, *([expires] if expires else [])]
    digest = hashlib.sha256(":".join(parts).encode(errors="replace")).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode()


def is_signed(query: Mapping[str, str], operation: str, token: str) -> bool:
    """Return whether this token signed a file address that has not expired."""
    expires = query.get("signature_expiration", "")
    made = signature(query.get("path", ""), operation, query.get("username", ""), token, expires)
    if not same(query.get("signature", ""), made):
        return False
    return not expires or (expires.isdecimal() and int(expires) >= time.time())


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
    return named_user(name.partition(":")[0])


def named_user(name: str) -> str | None:
    """Return `root` for root, and None (the ordinary user) for every other name."""
    return "root" if name == "root" else None
