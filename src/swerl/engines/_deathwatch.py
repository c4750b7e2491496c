"""Be the parent of a server, and let nothing of it live on.

`python _deathwatch.py PARENT_PID STOP_S COMMAND…`: an engine must not outlive a controller that got
`kill -9`, at no moment of its start. Every process that the command begins, one that left its
session included, falls back to this one (PR_SET_CHILD_SUBREAPER), which kills them all when the
command ends or the kernel says that the parent died (PR_SET_PDEATHSIG). SIGTERM asks the command to
end and gives it STOP_S seconds. Other systems than Linux have no prctl; there only a clean exit
stops the command.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.SIGUSR1
ASKED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
AWAITED = ASKED | {PARENT_DIED, signal.SIGALRM, signal.SIGCHLD}


def main() -> None:
    """Run the command to its end, and exit with its code."""
    parent, stop_s, *command = sys.argv[1:]
    # Blocked ones wait until they are asked for, so that none is lost on the way.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with(int(parent), PARENT_DIED)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        _become(command, guard, usual)
    _let_go()
    status = _until_end(server, float(stop_s))
    _end_all()
    sys.exit(status if status >= 0 else 128 - status)


def _die_with(parent: int, number: signal.Signals) -> None:
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the parent died before the command began")


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def _become(command: list[str], guard: int, mask: set[int | signal.Signals]) -> NoReturn:
    _die_with(guard, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


def _let_go() -> None:
    """Close the server's own files and sockets: somebody waits for their end."""
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if number > sys.stderr.fileno():
            with contextlib.suppress(OSError):
                os.close(number)


def _until_end(server: int, stop_s: float) -> int:
    """Wait for the server, and kill it when it must not go on. Returns its exit code."""
    while True:
        number = signal.sigwait(AWAITED)
        if number in ASKED:
            os.kill(server, number)
            signal.setitimer(signal.ITIMER_REAL, stop_s)
        elif number != signal.SIGCHLD:
            os.kill(server, signal.SIGKILL)
        for pid, code in _ended():
            if pid == server:
                return code


def _ended() -> Iterator[tuple[int, int]]:
    """Yield the id and the exit code of each child that ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _end_all() -> None:
    """Kill children until none is left: those of a killed one are this one's next."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> Iterator[int]:
    me = str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # A program's name stands in brackets and may hold any of the two.
            if path.read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                yield int(path.parent.name)


if __name__ == "__main__":
    main()
