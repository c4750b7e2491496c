"""Which sandbox and which of its ports a request is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from swerl.sandboxes.e2b_server.envd import PORT

_HOST = re.compile(r"(\d{1,5})-([0-9a-f]{20})(?:-[a-z0-9]+)?\.[^/]+", re.IGNORECASE)
"""`<port>-<id>.<domain>`, with what old SDKs append to an id; no machine's own name looks so."""


@dataclass(frozen=True, slots=True)
class Address:
    """A port of a sandbox."""

    sandbox_id: str
    port: int


def of(headers: Mapping[str, str]) -> Address | None:
    """Return where a request goes: by the host name `<port>-<id>.<domain>`, else by headers."""
    if match := _HOST.fullmatch(headers.get("Host", "")):
        return Address(match[2].lower(), int(match[1]))
    sandbox_id = headers.get("E2b-Sandbox-Id", "")
    if not sandbox_id:
        return None
    port = headers.get("E2b-Sandbox-Port", "")
    return Address(sandbox_id, int(port) if re.fullmatch(r"\d{1,5}", port) else PORT)
