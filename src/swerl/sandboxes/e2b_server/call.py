"""One call of a Connect service, as the services see it."""

from __future__ import annotations

from dataclasses import dataclass

from swerl.sandboxes.e2b_server.boxes import Box
from swerl.sandboxes.e2b_server.fields import Message


@dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    box: Box
    user: str | None
    """`root`, or None for the sandbox's ordinary user."""
    message: Message
    timeout_s: float | None
    """How long the client lets it take."""
    keepalive_s: float
    """Silence after which a stream shows that it lives."""
