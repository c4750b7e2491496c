"""What the operator of an E2B-compatible server decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swerl.core.sandbox import Limits


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server; none of them can be changed by its clients."""

    host: str = "127.0.0.1"
    """Address to listen on. Loopback, because whoever has the key runs commands here."""
    port: int = 49000
    """Port to listen on; 0 takes a free one."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Template id -> image. An id that is missing here is an image reference itself."""
    image_key: str = "image"
    """Metadata key that names the image in place of the template, as slime's clients do."""
    workdir: str = "/home/user"
    """Where commands start and relative paths begin; E2B's own templates have it there."""
    limits: Limits = field(default_factory=Limits)
    """What each sandbox may use. Its `lifetime_s` is not read: `max_lifetime_s` is."""
    max_lifetime_s: float = 86400.0
    """Longest life that a client may ask for, in seconds; 24 h is E2B's own bound."""
    max_sandboxes: int = 256
    """Sandboxes at once; more are refused with 429, which the SDK retries."""
    max_file_mib: int = 512
    """Largest file that can be sent, in MiB: a file is held in memory while it moves."""
    takes_orders: bool = False
    """Whether a client may order a whole sandbox, `core.sandbox.SandboxOrder`: its limits, folders
    of this machine as its image and to mount. For a server whose one client is its operator."""
