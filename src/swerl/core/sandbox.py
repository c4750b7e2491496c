"""Data of sandboxes: limits, mounts, names, and results of commands."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from swerl.core.errors import SandboxError, SandboxFileError, SandboxFolderError
from swerl.core.liveness import Life, boot_time_s, life_at, pid_namespace

_FOLDER_SLACK_S = 2.0
"""Largest assumed difference between the clocks of processes and of files."""

TIMED_OUT = 124
"""Exit code of a command that its timeout ended."""
ROOT_ENV = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
OUTPUT_CAP_BYTES = 8 << 20
"""Most bytes kept of each of a command's two output streams; test logs are below 2 MiB."""


def require_path(verb: str, path: str, sandbox_id: str, *, errors: str = "surrogateescape") -> None:
    """Raise SandboxFileError if no file can have this path; `errors` as for `str.encode`."""
    reason = ""
    if not path or "\0" in path:
        reason = "it is empty or holds a null byte"
    try:
        path.encode("utf-8", errors)
    except UnicodeEncodeError:
        reason = "it is no Unicode text"
    if reason:
        raise file_error(verb, path, sandbox_id, reason)


def file_error(
    verb: str, path: str, sandbox_id: str, reason: str, *, is_folder: bool = False, hint: str = ""
) -> SandboxFileError:
    """Return the error of a path that cannot be read or written; `verb` is read or write."""
    shown = path.encode("utf-8", "backslashreplace").decode()
    message = f"cannot {verb} {shown!r} in sandbox {sandbox_id}: {reason}"
    kind = SandboxFolderError if is_folder else SandboxFileError
    return kind(message, reason=reason, hint=hint or "name a plain file in a writable folder")


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox."""

    memory_mib: int = 2048
    num_processes: int = 256
    num_cpus: float = 1.0
    disk_mib: int = 4096
    lifetime_s: float = 3600.0
    """Seconds after which the sandbox ends, even if its owner does not close it."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder that a sandbox sees read-only."""

    source: Path
    target: str

    def fingerprint(self) -> str:
        """Return a key that changes with any file of the folder. Raises SandboxError."""
        import hashlib  # the local backend's spawner does without it

        source = self.source.resolve()
        if not source.is_dir():
            raise SandboxError(
                f"there is no folder {source} to mount",
                hint="`swerl agents fetch` downloads an agent's files",
            )
        digest = hashlib.sha256(str(source).encode())
        for folder, folders, names in os.walk(source):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)  # noqa: PTH118  thousands of files
                stat = os.lstat(path)
                digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class SandboxOrder:
    """All settings of a sandbox as one text, for a run's own servers: E2B's protocol has an image
    but no limits and mounts."""

    KEY: ClassVar[str] = "swerl-order"
    """Metadata key of the text."""

    image: str
    limits: Limits
    workdir: str
    mounts: tuple[Mount, ...] = ()

    def to_text(self) -> str:
        mounts = [(str(mount.source), mount.target) for mount in self.mounts]
        return json.dumps({**asdict(self), "mounts": mounts})

    @classmethod
    def from_text(cls, text: str) -> SandboxOrder:
        """Parse it. Raises ValueError, KeyError and TypeError."""
        fields = json.loads(text)
        mounts = tuple(Mount(Path(source), target) for source, target in fields["mounts"])
        return cls(fields["image"], Limits(**fields["limits"]), fields["workdir"], mounts)


@dataclass(frozen=True, slots=True)
class Exec:
    """The result of one command in a sandbox."""

    exit_code: int
    """Exit code; 128 + n after signal n; 124 when `timed_out`."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """True if output beyond the cap was dropped."""
    duration_s: float = 0.0

    @property
    def text(self) -> str:
        """Stdout and stderr as one text."""
        return (self.stdout + self.stderr).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the output of a running command."""

    data: bytes
    is_stderr: bool = False


@dataclass(slots=True)
class CappedOutput:
    """The first `cap` bytes of each of a command's output streams."""

    cap: int = field(default_factory=lambda: OUTPUT_CAP_BYTES)
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    truncated: bool = False

    def add(self, chunk: Chunk) -> bool:
        """Keep what fits under the cap; return whether all of it did."""
        stream = self.stderr if chunk.is_stderr else self.stdout
        room = self.cap - len(stream)
        stream += chunk.data[:room]
        fits = len(chunk.data) <= room
        self.truncated |= not fits
        return fits

    def result(self, exit_code: int, duration_s: float, *, timed_out: bool = False) -> Exec:
        """Return the result of a command with this output."""
        out, err = bytes(self.stdout), bytes(self.stderr)
        return Exec(exit_code, out, err, timed_out, self.truncated, duration_s)


def closed_input() -> SandboxError:
    """Return the error for a write to a command's closed standard input."""
    message = "the command's standard input is closed"
    return SandboxError(message, hint="it has ended, or its input was closed")


@dataclass(frozen=True, slots=True)
class LiveSandbox:
    """A sandbox of swerl that its provider lists."""

    name: str
    """The name that it was opened with."""
    id: str
    """The provider's id of it."""
    image: str = ""
    started_unix_s: float = 0.0
    """Start time in seconds since 1970; 0 if the provider does not give it."""


def new_name() -> str:
    """Return a fresh sandbox name: `swerl-<pid of its owner>-<pid_namespace()><10 hex digits>`."""
    return f"swerl-{os.getpid()}-{pid_namespace()}{os.urandom(5).hex()}"


def folder_owner_lives(folder: Path) -> bool:
    """Return whether the controller named in a folder `swerl-<pid>-<token>` may still run.

    If its process id belongs to another pid namespace, nothing is known but that it did not
    survive a reboot.
    """
    _, pid, token = (*folder.name.split("-"), "", "")[:3]
    try:
        made_s = folder.stat().st_mtime
    except OSError:
        return False
    life = Life.ELSEWHERE
    if pid.isdigit():
        life = life_at(int(pid), token[:6], made_s, slack_s=_FOLDER_SLACK_S)
    survived = made_s + _FOLDER_SLACK_S > boot_time_s()
    return life is Life.ALIVE or (life is Life.ELSEWHERE and survived)
