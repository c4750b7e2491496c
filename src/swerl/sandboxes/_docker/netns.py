"""A listening socket in a container's network namespace, in the hands of this process."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from swerl.sandboxes._local import kernel

_FIRST_PORT = 41414


def belongs_to(pid: int, container: str) -> bool:
    """Say whether that process of this machine is in the container: the daemon may be elsewhere."""
    try:
        return container in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def listen(pid: int) -> socket.socket:
    """Listen on the loopback of the process's network namespace. Raises OSError.

    A thread of its own enters the namespace, for namespaces are a thread's, and ends there.
    """
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            made.append(_listen_inside(pid))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="swerl-netns")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def _listen_inside(pid: int) -> socket.socket:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.setns(namespace, kernel.NEWNET)
    finally:
        os.close(namespace)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _bind_free(sock)
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_free(sock: socket.socket) -> None:
    for port in range(_FIRST_PORT, _FIRST_PORT + 100):
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            continue
        return
    sock.bind(("127.0.0.1", 0))
