"""What a Sandbox may use, sees of its host, and answers a command with."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

FROM_INSIDE = "what ran inside brought it about"
"""Words of a server's answer that stand for `SandboxError.from_inside`, which no protocol knows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use."""

    memory_mib: int = 2048
    num_processes: int = 256
    num_cpus: float = 1.0
    disk_mib: int = 4096
    lifetime_s: float = 3600.0
    """Seconds after which the sandbox is gone even if its owner forgot it."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder that a sandbox sees read-only."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class SandboxOrder:
    """A whole sandbox as one text: for a run's own servers, whose protocol knows an image alone."""

    KEY: ClassVar[str] = "swerl-order"
    """Metadata key that the text goes under."""

    image: str
    limits: Limits
    workdir: str
    mounts: tuple[Mount, ...] = ()

    def to_text(self) -> str:
        """Return it as JSON."""
        mounts = [(str(mount.source), mount.target) for mount in self.mounts]
        return json.dumps({**asdict(self), "mounts": mounts})

    @classmethod
    def from_text(cls, text: str) -> SandboxOrder:
        """Read it. Raises ValueError, KeyError and TypeError on anything else."""
        told = json.loads(text)
        mounts = tuple(Mount(Path(source), target) for source, target in told["mounts"])
        return cls(told["image"], Limits(**told["limits"]), told["workdir"], mounts)


@dataclass(frozen=True, slots=True)
class Exec:
    """The end of one command in a sandbox."""

    exit_code: int
    """Exit code; 128 + n after signal n; 124 when `timed_out`."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """Whether output over the cap was dropped."""
    duration_s: float = 0.0

    @property
    def text(self) -> str:
        """Stdout and stderr as one text."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of what a running command prints."""

    data: bytes
    is_stderr: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox took from its start on; None where its backend cannot tell."""

    peak_memory_mib: float | None = None
    disk_mib: float | None = None
    """What lies on its disk beyond the image."""


@dataclass(frozen=True, slots=True)
class LiveSandbox:
    """A sandbox of swerl's that its provider says exists."""

    name: str
    """The name that it was opened under."""
    id: str
    """What the provider calls it."""
    image: str = ""
    started_unix_s: float = 0.0
    """When it began, in seconds since 1970; 0 where the provider does not say."""


def new_name() -> str:
    """Return a fresh sandbox name, `swerl-<pid of its owner>-<6 hex digits: place()><10 hex>`."""
    return f"swerl-{os.getpid()}-{place()}{secrets.token_hex(5)}"


@cache
def place() -> str:
    """Return 6 hex digits for where process ids mean something: this boot, this pid namespace.

    A name that ends elsewhere says nothing about the processes here.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = boot.read_text().strip() if boot.exists() else platform.node()
    namespace = Path("/proc/self/ns/pid")
    if namespace.is_symlink():
        known += str(namespace.readlink())
    return hashlib.blake2s(known.encode(), digest_size=3).hexdigest()
