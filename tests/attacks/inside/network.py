"""Network attacks from inside. Packets go only to addresses that the caller gives."""

from __future__ import annotations

import fcntl
import socket
import struct

from tests.attacks.inside.calls import name_of

_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_PACKET, _VSOCK = 17, 40


def routes() -> dict[str, str]:
    """Return the interfaces other than loopback, and routes that leave by one."""
    names = {name: "ok" for _, name in socket.if_nameindex() if name != "lo"}
    with open("/proc/net/route") as file:
        lines = [line.split() for line in file.readlines()[1:]]
    return {**names, **{f"route by {line[0]}": "ok" for line in lines if line[0] != "lo"}}


def connect(targets: list[tuple[str, int]], abstract: str) -> dict[str, str]:
    """Connect to each address and port, and to an abstract Unix socket."""
    outcomes = {f"{host} port {port}": _greeting((host, port)) for host, port in targets}
    return {**outcomes, "an abstract socket": _greeting("\0" + abstract)}


def ask(port: int, requests: dict[str, bytes]) -> dict[str, str]:
    """Send raw HTTP requests to a port of loopback and return each response."""
    return {name: _ask(port, request) for name, request in requests.items()}


def special_sockets() -> dict[str, str]:
    """Open sockets that read or forge packets, or lead to the hypervisor."""
    kinds = {
        "a raw socket": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "a raw IPv6 socket": (socket.AF_INET6, socket.SOCK_RAW, 58),
        "a packet socket": (_PACKET, socket.SOCK_RAW, 0x0300),
        "a socket to the hypervisor": (_VSOCK, socket.SOCK_STREAM, 0),
    }
    outcomes = {}
    for name, kind in kinds.items():
        try:
            socket.socket(*kind).close()
            outcomes[name] = "ok"
        except OSError as error:
            outcomes[name] = name_of(error)
    return outcomes


def configure() -> dict[str, str]:
    """Set the flags of loopback to their current value."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            request = struct.pack("16sH14x", b"lo", 0)
            fcntl.ioctl(sock, _SIOCSIFFLAGS, fcntl.ioctl(sock, _SIOCGIFFLAGS, request))
        except OSError as error:
            return {"setting an interface": name_of(error)}
    return {"setting an interface": "ok"}


def _greeting(address: str | tuple[str, int]) -> str:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as sock:
        sock.settimeout(0.5)
        try:
            sock.connect(address)
        except OSError as error:
            return name_of(error)
    return "ok"


def _ask(port: int, request: bytes) -> str:
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.sendall(request)
            while piece := sock.recv(65536):
                answer += piece
    except OSError as error:
        return answer.decode(errors="replace") or name_of(error)
    return answer.decode(errors="replace")
