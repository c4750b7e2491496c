"""Messages between the controller and its helper processes: JSON and descriptors on a socket.

The sockets keep packet boundaries (SOCK_SEQPACKET). A message that exceeds one packet is sent as a
memory file, whose descriptor comes first.
"""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import FileIO

from swerl.core.chat import Json

_PACKET_BYTES = 60_000
_MAX_FDS = 8
_BIG = b"\0"


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """Everything that a supervisor needs to make one sandbox. Paths are host paths."""

    id: str
    workdir: str
    image: str = ""
    """Image reference."""
    bwrap: str = ""
    """Path of bubblewrap; empty: make the namespaces without it."""
    layers: Sequence[str] = ()
    """Folders of the writable root, lowest first."""
    is_whole: bool = False
    """True if the layers are a complete system. If so, the base goes over them, not below."""
    content: str = ""
    """Folder with the initial content of the workdir."""
    over: Sequence[str] = ()
    """Folders of snapshots over the content, or over the root if there is none; lowest first."""
    binds: Sequence[tuple[str, str]] = ()
    """(host path, path inside) of the host's programs, read-only."""
    mounts: Sequence[tuple[str, str]] = ()
    """(host path, path inside) of a user's folders, read-only; inside, the agent owns them."""
    links: Sequence[tuple[str, str]] = ()
    """(path inside, target) of symbolic links in the base."""
    files: Sequence[tuple[str, str]] = ()
    """(path inside, text) of small files in the base."""
    scratch: str = ""
    """Host folder for files that the sandbox writes; empty: memory."""
    host_id: int = 0
    """Host user id of its processes; 0: the user of the controller."""
    memory_mib: int = 0
    num_processes: int = 0
    num_cpus: float = 0.0
    disk_mib: int = 0
    lifetime_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Command:
    """One command to start; the descriptors of its streams are sent with it."""

    number: int
    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    as_root: bool = False


@dataclass(frozen=True, slots=True)
class Packet:
    """One received message with its descriptors."""

    body: dict[str, Json]
    fds: list[int]


def send(
    sock: socket.socket, body: SandboxPlan | Command | Mapping[str, Json], fds: Sequence[int] = ()
) -> None:
    """Send one message. Raises OSError if the other side is gone."""
    if isinstance(body, SandboxPlan | Command):
        # Unlike `asdict`, this copies no value.
        body = {each.name: getattr(body, each.name) for each in fields(body)}
    data = json.dumps(body).encode()
    if len(data) <= _PACKET_BYTES:
        socket.send_fds(sock, [data], fds)
        return
    # A descriptor can pass more bytes than a packet.
    memory = os.memfd_create("message")
    try:
        with FileIO(memory, "wb", closefd=False) as file:
            file.write(data)
        socket.send_fds(sock, [_BIG], [memory, *fds])
    finally:
        os.close(memory)


def failure(error: OSError) -> dict[str, Json]:
    text = error.strerror or str(error)
    if error.filename:
        text = f"{text}: {error.filename}"
    return {"failed": text, "errno": error.errno or 0}


def receive(sock: socket.socket) -> Packet | None:
    """Receive one message; None at the end."""
    room = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
    try:  # `socket.recv_fds` ignores its flags, and a command would inherit every descriptor
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
