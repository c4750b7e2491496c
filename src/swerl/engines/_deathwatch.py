"""Become another command that the kernel kills when its parent dies.

`python _deathwatch.py PARENT_PID COMMAND…`: an engine must not outlive a controller that got
`kill -9`. The request survives exec, so any program can be guarded this way without its help.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, then replace this process."""
    parent, *command = sys.argv[1:]
    # Other systems than Linux have no prctl; there only a clean exit stops the command.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent died before the command began")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
