"""One program that serves: start it, wait until it answers, stop it and clear up."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_START_S = 30.0
_STOP_S = 20.0


class CannotRunError(Exception):
    """This machine cannot run the daemon; the message says why."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon that answers."""

    address: str
    process: subprocess.Popen[bytes]
    folder: Path
    """Everything that it writes."""
    clear: Callable[[], None] = field(default=lambda: None)
    """Removes what it leaves outside its folder."""

    def stop(self) -> None:
        """End it and leave nothing of it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def launch(
    argv: Sequence[str], folder: Path, answers: Callable[[], bool]
) -> subprocess.Popen[bytes]:
    """Start a daemon and wait until it answers. Raises CannotRunError with its last words."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", start_new_session=True
        )
    give_up = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < give_up:
        with suppress(OSError):
            if answers():
                return process
        time.sleep(0.05)
    process.kill()
    process.wait()
    said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it says nothing"]
    message = f"{Path(argv[0]).name} does not start: {said[0][-300:]}"
    raise CannotRunError(message)


def require(*programs: str) -> None:
    """Raise CannotRunError where a program is not installed."""
    missing = [name for name in programs if not shutil.which(name)]
    if missing:
        message = f"{', '.join(missing)} is not installed"
        raise CannotRunError(message)


def answers(path: Path) -> bool:
    """Return whether a daemon with Docker's API answers on this socket. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(path))
        sock.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
        return b" 200 " in sock.recv(64)


def mounts(folder: Path) -> list[str]:
    """Return the mount points below a folder, in the order of their making."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [
        point for point in (line.split()[4] for line in lines) if point.startswith(f"{folder}/")
    ]
