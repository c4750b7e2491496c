"""Run a server as a child, and kill all its processes when it ends or the controller dies.

`python _process_guard.py PARENT_PID STOP_S COMMAND…`: no process of an engine may outlive a
controller that got `kill -9`, not even during its start. Every orphan of the command becomes a
child of this process (PR_SET_CHILD_SUBREAPER), also one that left its session. This process kills
them all when the command ends or when the kernel signals the parent's death (PR_SET_PDEATHSIG).
SIGTERM is passed on to the command, which then has STOP_S seconds to end. Systems other than Linux
have no prctl; there only a clean exit stops the command.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.SIGUSR1
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
AWAITED = STOP_SIGNALS | {PARENT_DIED, signal.SIGALRM, signal.SIGCHLD}


def main() -> None:
    """Run the command to its end, and exit with its code."""
    parent, stop_s, *command = sys.argv[1:]
    # Blocked signals stay pending until sigwait reads them, so none is lost.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with(int(parent), PARENT_DIED)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        _die_with(guard, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.exit(f"cannot run {command[0]}: {error.strerror}")
    # Close the server's own files and sockets: other processes wait for their end.
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        if number > sys.stderr.fileno():
            with contextlib.suppress(OSError):
                os.close(number)
    status = _wait_for(server, float(stop_s))
    _kill_children()
    sys.exit(status if status >= 0 else 128 - status)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def _die_with(parent: int, number: signal.Signals) -> None:
    """Request a signal at the parent's death; exit if it is dead already."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the parent died before the command began")


def _wait_for(server: int, stop_s: float) -> int:
    """Pass signals on until the server has ended; return its exit code."""
    while True:
        number = signal.sigwait(AWAITED)
        if number in STOP_SIGNALS:
            os.kill(server, number)
            signal.setitimer(signal.ITIMER_REAL, stop_s)
        elif number != signal.SIGCHLD:
            os.kill(server, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == server:
                    return os.waitstatus_to_exitcode(ended[1])


def _kill_children() -> None:
    """Kill children until none is left: those of a killed one become this process's own."""
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
            # A program's name is in brackets, and may contain brackets itself.
            if path.read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                yield int(path.parent.name)


if __name__ == "__main__":
    main()
