"""Messages between the controller and its helper processes: JSON and descriptors on a socket.

The sockets keep packet boundaries (SOCK_SEQPACKET). A message too big for a packet travels in a
memory file whose descriptor comes first.
"""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import FileIO

from swerl.core.chat import Json

_PACKET_BYTES = 60_000
_MAX_FDS = 8
_BIG = b"\0"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a warden needs to make one sandbox. Paths are the host's."""

    id: str
    workdir: str
    image: str = ""
    """The reference that it was opened by."""
    bwrap: str = ""
    """Path of bubblewrap; empty to make the namespaces without it."""
    layers: Sequence[str] = ()
    """Folders that make one writable root, lowest first."""
    is_whole: bool = False
    """Whether the layers are a whole system, over which the base lies, and not the host's."""
    content: str = ""
    """Folder whose content the workdir starts with."""
    binds: Sequence[tuple[str, str]] = ()
    """(host path, path inside) of the host's own programs, read-only."""
    mounts: Sequence[tuple[str, str]] = ()
    """(host path, path inside) of a user's folders, read-only; inside, the agent owns them."""
    links: Sequence[tuple[str, str]] = ()
    """(path inside, target) of symbolic links in the base."""
    files: Sequence[tuple[str, str]] = ()
    """(path inside, text) of small files in the base."""
    scratch: str = ""
    """Host folder for what the sandbox writes; empty for memory."""
    host_id: int = 0
    """The user that its processes are to be on the host; 0 for the one who opens it."""
    memory_mib: int = 0
    num_processes: int = 0
    num_cpus: float = 0.0
    disk_mib: int = 0
    lifetime_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Command:
    """One command for a warden to start; its descriptors travel beside it."""

    number: int
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    as_root: bool = False


@dataclass(frozen=True, slots=True)
class Packet:
    """One received message and the descriptors that came with it."""

    body: dict[str, Json]
    fds: list[int]


def send(
    sock: socket.socket, body: Plan | Command | Mapping[str, Json], fds: Sequence[int] = ()
) -> None:
    """Send one message. Raises OSError when the other side is gone."""
    message = asdict(body) if isinstance(body, Plan | Command) else body
    data = json.dumps(message).encode()
    if len(data) <= _PACKET_BYTES:
        socket.send_fds(sock, [data], fds)
        return
    memory = os.memfd_create("message")
    try:
        with FileIO(memory, "wb", closefd=False) as file:
            file.write(data)
        socket.send_fds(sock, [_BIG], [memory, *fds])
    finally:
        os.close(memory)


def failure(error: OSError) -> dict[str, Json]:
    """Build the message that says why a sandbox cannot start."""
    text = error.strerror or str(error)
    if error.filename:
        text = f"{text}: {error.filename}"
    return {"failed": text, "errno": error.errno or 0}


def receive(sock: socket.socket) -> Packet | None:
    """Receive one message, or None at the end."""
    room = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
    try:  # `socket.recv_fds` drops its flags, and a command would inherit every descriptor
        data, parts, _, _ = sock.recvmsg(_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    fds = [fd for _, _, part in parts for fd in array("i", part)]
    if not data:
        return None
    if data == _BIG:
        with FileIO(fds.pop(0)) as file:
            file.seek(0)
            data = file.readall()
    return Packet(json.loads(data), fds)
