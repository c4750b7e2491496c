"""One daemon for all workers of a test run, stopped when the last of them is gone.

A supervisor process owns the daemon. Every worker holds a shared lock for as long as it uses it;
the kernel lets go of a killed worker's lock. The supervisor waits for the exclusive one.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .daemon import CannotRunError

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 0.3


@contextmanager
def shared(kind: str, folder: Path) -> Iterator[str]:
    """Yield the address of the run's daemon; `folder` belongs to the run.

    `kind` is the module here that starts it. Raises CannotRunError where it cannot run.
    """
    state = folder / f"{kind}.json"
    with (folder / f"{kind}.users").open("w") as users:
        with locked(folder / f"{kind}.start"):
            fcntl.flock(users, fcntl.LOCK_SH)
            if not state.exists():
                _start_supervisor(kind, folder)
            told = json.loads(state.read_text())
        try:
            if told["reason"]:
                raise CannotRunError(told["reason"])
            yield told["address"]
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            _wait_for_the_end(folder / f"{kind}.users")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only one in here among the run's workers."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def supervise(kind: str, folder: Path) -> None:
    """Start the daemon, tell how that went, and stop it when nobody uses it any more."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # unlike `ignore`, not handed down
    state = folder / f"{kind}.json"
    try:
        daemon = importlib.import_module(f"tests.services.{kind}").start()
    except CannotRunError as error:
        _tell(state, address="", reason=str(error))
        return
    _tell(state, address=daemon.address, reason="")
    with (folder / f"{kind}.users").open() as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        state.unlink()
        daemon.stop()


def _start_supervisor(kind: str, folder: Path) -> None:
    state = folder / f"{kind}.json"
    with (folder / f"{kind}.supervisor.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.shared", kind, str(folder)],
            cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    while not state.exists():
        if process.poll() is not None and not state.exists():
            said = (folder / f"{kind}.supervisor.log").read_text()
            raise CannotRunError(said[-300:])
        time.sleep(0.01)


def _tell(state: Path, **told: str) -> None:
    draft = state.with_suffix(".draft")
    draft.write_text(json.dumps(told))
    draft.rename(state)


def _wait_for_the_end(path: Path) -> None:
    """Wait while the supervisor stops the daemon; at once where other workers go on."""
    give_up = time.monotonic() + _GRACE_S
    with path.open() as users:
        while time.monotonic() < give_up:
            try:
                fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(users, fcntl.LOCK_SH)
                return
            fcntl.flock(users, fcntl.LOCK_UN)
            time.sleep(0.02)


if __name__ == "__main__":
    supervise(sys.argv[1], Path(sys.argv[2]))
