"""A command's own process, from the fork to the exec."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from typing import NoReturn

from swerl.sandboxes import _boot as boot
from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes import _seccomp as seccomp
from swerl.sandboxes._wire import Command

_RLIMIT_LOCKS = 10
"""A limit that Linux no longer enforces but still hands down: it marks a command's processes."""
_UNLIMITED = 1 << 40
_PF_EXITING = 4
_NOT_STARTED, _NOT_FOUND = 126, 127


def run(command: Command, streams: Sequence[int], system_calls: bytes | None) -> NoReturn:
    """Become the command. Exits 127 where its program is missing, 126 where it cannot start."""
    code = _NOT_STARTED
    try:
        os.setsid()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        for name in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(name, signal.SIG_DFL)
        _mark(command.number)
        if command.as_root:
            _become_root()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if command.as_root:
            kernel.drop_capabilities()
        if system_calls:
            seccomp.install(system_calls)
        os.chdir(command.cwd)
        _exec(command)
    except FileNotFoundError as error:
        code = _NOT_STARTED if error.filename == command.cwd else _NOT_FOUND
        _complain(error)
    except (OSError, ValueError) as error:
        _complain(error)
    finally:
        os._exit(code)


def mark_of(folder: int) -> int:
    """Return the number of the command that a process belongs to, by its /proc folder."""
    fd = os.open("limits", os.O_RDONLY, dir_fd=folder)
    with FileIO(fd) as file:
        for line in file:
            if line.startswith(b"Max file locks"):
                hard = line.split()[4]
                return 0 if hard == b"unlimited" else int(hard) - _UNLIMITED
    return 0


def state_of(folder: int) -> bytes:
    """Return the letter of a process's state, by its /proc folder."""
    return _stat(os.open("stat", os.O_RDONLY, dir_fd=folder))[0]


def is_ending(folder: str) -> bool:
    """Say whether a process is dying or gone, by the path of its /proc folder."""
    try:
        return bool(int(_stat(os.open(f"{folder}/stat", os.O_RDONLY))[6]) & _PF_EXITING)
    except OSError:
        return True


def _stat(fd: int) -> list[bytes]:
    """Return what follows the program's name in a /proc stat file."""
    with FileIO(fd) as file:
        return file.readall().rpartition(b")")[2].split()


def _mark(number: int) -> None:
    mark = _UNLIMITED + number
    resource.setrlimit(_RLIMIT_LOCKS, (mark, mark))
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(OSError):  # so that memory pressure kills a command before the warden
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"500")
        os.close(fd)


def _become_root() -> None:
    """Show the same user as uid 0, in a user namespace of this command's own."""
    kernel.unshare(kernel.NEWUSER)
    boot.map_ids(0, 0, boot.AGENT_ID, boot.AGENT_ID)


def _exec(command: Command) -> NoReturn:
    if not command.argv:
        message = "no program to run"
        raise ValueError(message)
    name, argv = command.argv[0], list(command.argv)
    if "/" in name:
        os.execve(name, argv, command.env)
    failure: OSError = FileNotFoundError(2, os.strerror(2), name)
    for folder in command.env.get("PATH", "").split(":"):
        try:
            os.execve(f"{folder}/{name}", argv, command.env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            failure = error
    raise failure


def _complain(error: Exception) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    with suppress(OSError):
        os.write(2, f"swerl: {text}\n".encode())
