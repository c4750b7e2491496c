"""Start a command from the warden, mark its processes, and tell what became of them.

A mark is a resource limit that Linux no longer enforces but still hands down to every process
that a command starts, whatever session it moves to: the soft RLIMIT_LOCKS.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NoReturn

from swerl.sandboxes._local import boot, kernel
from swerl.sandboxes._local.wire import Command

_RLIMIT_LOCKS = 10
_MARK_BASE = 1 << 40
_PF_EXITING = 4
_OOM_SCORE = 500
"""Memory pressure kills a command before the warden, whose score is 0."""
_NOT_STARTED, _NOT_FOUND = 126, 127
_DEFAULTED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
"""Signals that Python ignores or handles; a command must not."""


class Launcher:
    """Starts commands inside; made while the warden still sees the host's /proc."""

    def __init__(self) -> None:
        self.password = int.from_bytes(os.urandom(8), "little")
        """Opens the system call filter for the one namespace that user `root` needs."""
        self._oom = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        self._own_score = int(os.read(self._oom, 8))

    def start(self, command: Command, streams: Sequence[int]) -> int:
        """Start a command and return its pid. Raises OSError, or ValueError on a bad argument."""
        os.chdir(command.cwd)
        try:
            path = _find(command)
            with self._mark(command.number):
                pid = self._start(path, command, streams)
            with suppress(OSError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, pid, 0)
            return pid
        finally:
            os.chdir("/")

    def _start(self, path: str, command: Command, streams: Sequence[int]) -> int:
        if command.as_root:
            return kernel.patiently(lambda: _fork_as_root(path, command, streams, self.password))
        return kernel.patiently(lambda: _spawn(path, command, streams))

    @contextmanager
    def _mark(self, number: int) -> Iterator[None]:
        """Wear the command's mark and score for as long as it is being started."""
        own, hard = resource.getrlimit(_RLIMIT_LOCKS)
        resource.setrlimit(_RLIMIT_LOCKS, (_MARK_BASE + number, hard))
        self._set_score(max(_OOM_SCORE, self._own_score))
        try:
            yield
        finally:
            self._set_score(self._own_score)
            resource.setrlimit(_RLIMIT_LOCKS, (own, hard))

    def _set_score(self, score: int) -> None:
        with suppress(PermissionError):
            os.pwrite(self._oom, str(score).encode(), 0)


def exit_code_of(error: Exception, command: Command) -> int:
    """Return the exit code that a shell would give where a command cannot start."""
    if isinstance(error, FileNotFoundError) and error.filename != command.cwd:
        return _NOT_FOUND
    return _NOT_STARTED


def signal_marked(number: int, signum: int, *, spared: bytes) -> bool:
    """Signal the command's processes that are in none of the spared states.

    Says whether there was one that could still run: one that waits in the kernel, as a parent does
    until its new child has begun a program of its own, meets the signal before it runs again.
    """
    found = False
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  paths cost a third more
        with suppress(OSError):  # it ended meanwhile
            fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _mark_of(fd) == number and (state := _stat(fd)[0]) not in spared:
                    signal.pidfd_send_signal(fd, signum)
                    found = found or state != b"D"
            finally:
                os.close(fd)
    return found


def first_process_is_ending() -> bool:
    """Say whether the sandbox's first process is dying or gone."""
    try:
        fd = os.open("/proc/1", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        return bool(int(_stat(fd)[6]) & _PF_EXITING)
    except OSError:
        return True
    finally:
        os.close(fd)


def _find(command: Command) -> str:
    """Return the path of the command's program, as execvp would find it."""
    if not command.argv:
        raise ValueError("no program to run")
    name = command.argv[0]
    if "/" in name:
        return name
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    for folder in command.env.get("PATH", "").split(":"):
        path = f"{folder or '.'}/{name}"
        if os.access(path, os.X_OK) and not Path(path).is_dir():
            return path
        if Path(path).exists():
            failure = PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    raise failure


def _spawn(path: str, command: Command, streams: Sequence[int]) -> int:
    return os.posix_spawn(
        path,
        list(command.argv),
        command.env,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)],
        setsid=True,
        setsigdef=_DEFAULTED,
    )


def _fork_as_root(path: str, command: Command, streams: Sequence[int], password: int) -> int:
    pid = os.fork()
    if pid == 0:
        _become_root(path, command, streams, password)
    return pid


def _become_root(path: str, command: Command, streams: Sequence[int], password: int) -> NoReturn:
    """Become a command that sees its user as uid 0, in a user namespace of its own."""
    try:
        os.setsid()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        for name in _DEFAULTED:
            signal.signal(name, signal.SIG_DFL)
        kernel.unshare(kernel.NEWUSER, password)
        boot.map_ids((0, 0), (boot.AGENT_ID, boot.AGENT_ID))
        kernel.drop_capabilities()
        os.execve(path, list(command.argv), command.env)
    except (OSError, ValueError) as error:
        os.write(2, complaint(error))
        os._exit(exit_code_of(error, command))
    finally:
        os._exit(_NOT_STARTED)


def complaint(error: Exception) -> bytes:
    """Return what a command that cannot start leaves on its standard error."""
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    return f"swerl: {text}\n".encode(errors="replace")


def _mark_of(folder: int) -> int:
    """Return the number of the command that a process belongs to, by its /proc folder."""
    for line in _read(folder, "limits").splitlines():
        if line.startswith(b"Max file locks"):
            soft = line.split()[3]
            return 0 if soft == b"unlimited" else int(soft) - _MARK_BASE
    return 0


def _stat(folder: int) -> list[bytes]:
    """Return what follows the program's name in a /proc folder's `stat`: the state and on."""
    return _read(folder, "stat").rpartition(b")")[2].split()


def _read(folder: int, name: str) -> bytes:
    with FileIO(os.open(name, os.O_RDONLY, dir_fd=folder)) as file:
        return file.readall()
