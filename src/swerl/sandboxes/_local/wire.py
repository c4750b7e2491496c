"""Messages between the controller and its helper processes: JSON and descriptors on a socket.

The sockets keep packet boundaries (SOCK_SEQPACKET). A message that exceeds one packet is sent as a
sealed memory file, whose descriptor comes first. Whatever else arrives is refused: a receiver waits
for nothing but the next packet.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import FileIO

from swerl.core.chat import Json

ALL_COMMANDS = 0
"""Instead of a command's number: every process of the sandbox."""

FROM_INSIDE, FROM_OUTSIDE = b"I", b"O"
"""Whose fault the end of a sandbox was, in the pipe from the spawner to the controller."""

_PACKET_BYTES = 60_000
_MAX_FDS = 8
_BIG = b"\0"
_MAX_BYTES = 16 << 20
"""Largest message; the kernel takes some 6 MiB of arguments and environment."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """Everything that a supervisor needs to make one sandbox. Paths are host paths."""

    id: str
    workdir: str
    image: str = ""
    """Image reference."""
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
        _send(sock, data, fds)
        return
    # A descriptor can pass more bytes than a packet.
    memory = os.memfd_create("message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with FileIO(memory, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        _send(sock, _BIG, [memory, *fds])
    finally:
        os.close(memory)


def _send(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    sock.sendmsg([data], rights)


def failure(error: OSError) -> dict[str, Json]:
    text = error.strerror or str(error)
    if error.filename:
        text = f"{text}: {error.filename}"
    return {"failed": text, "errno": error.errno or 0}


def receive(sock: socket.socket) -> Packet | None:
    """Receive one message; None at the end. Raises ValueError if it is none."""
    room = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
    try:  # `socket.recv_fds` ignores its flags, and a command would inherit every descriptor
        data, parts, _, _ = sock.recvmsg(_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the other end left a message unread; what it sent comes next
        return receive(sock)
    fds = [fd for _, _, part in parts for fd in array("i", part)]
    if not data:
        return None
    try:
        body = json.loads(_read_sealed(fds.pop(0)) if data == _BIG and fds else data)
        if not isinstance(body, dict):
            raise ValueError("a message is an object")
    except (ValueError, RecursionError) as error:
        for fd in fds:
            os.close(fd)
        raise ValueError("this is no message") from error
    return Packet(body, fds)


def _read_sealed(fd: int) -> bytes:
    """Return the bytes of a memory file. Raises ValueError if it is not one, sealed, and small."""
    try:
        size = os.fstat(fd).st_size
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or size > _MAX_BYTES:
            raise ValueError("its size can change, or is too large")
        return os.pread(fd, size, 0)
    except OSError as error:  # no memory file
        raise ValueError(str(error)) from error
    finally:
        os.close(fd)
