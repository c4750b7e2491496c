"""What a Sandbox may use, sees of its host, and answers a command with."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from swerl.core.liveness import Life, life_at, pid_namespace

_NAME = re.compile(r"swerl-(\d+)-([0-9a-f]{6})[0-9a-f]{10}")
_CLOCK_SLACK_S = 60.0
"""Largest difference assumed between a provider's clock and this machine's."""

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
    """Return a fresh sandbox name: `swerl-<pid of its owner>-<pid_namespace()><10 hex digits>`."""
    return f"swerl-{os.getpid()}-{pid_namespace()}{secrets.token_hex(5)}"


def owner_pid(name: str) -> int:
    """Return the owner's process id from a sandbox's name; 0 if the name has none."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0


def owner_life(name: str, started_s: float = 0.0) -> Life:
    """Return whether the owner in a sandbox's name runs. `started_s`: the sandbox's Unix start."""
    match = _NAME.fullmatch(name)
    if match is None:
        return Life.ELSEWHERE
    return life_at(int(match[1]), match[2], started_s, slack_s=_CLOCK_SLACK_S)
