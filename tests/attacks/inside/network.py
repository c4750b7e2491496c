"""Network attacks from inside. Packets go only to addresses that the caller gives."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

from tests.attacks.inside.calls import name_of

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PACKET, _VSOCK = 17, 40
_WAIT_S = 0.5
_AT_ONCE = 16
_MOST_SOCKETS, _SEARCH_S = 64, 5.0
_SOCKET_PLACES = ("/run", "/var/run", "/tmp", "/var/lib", "/home", "/root", "/dev")


def links() -> dict[str, str]:
    """Return the state of every interface other than loopback."""
    return {name: _state(name) for _, name in socket.if_nameindex() if name != "lo"}


def connect(targets: list[tuple[str, int]]) -> dict[str, str]:
    """Connect to each address and port."""
    return {f"{host} port {port}": _greeting((host, port)) for host, port in targets}


def connect_abstract(name: str) -> dict[str, str]:
    """Connect to an abstract Unix socket."""
    return {f"the abstract socket @{name}": _greeting("\0" + name)}


def send_datagram(host: str, port: int, word: str) -> dict[str, str]:
    """Send a word to a UDP port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(word.encode(), (host, port))
        except OSError as error:
            return {"send": name_of(error)}
    return {"send": "sent"}


def ask_resolvers(servers: list[str]) -> dict[str, str]:
    """Query each server for a name under .invalid, which cannot exist."""
    question = b"\x07\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x0bswerl-probe\x07invalid\x00"
    outcomes = {}
    for server in servers:
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_WAIT_S)
            try:
                sock.connect((server, 53))
                sock.send(question + b"\x00\x01\x00\x01")
                sock.recv(512)
                outcomes[f"{server} answers"] = "ok"
            except OSError as error:
                outcomes[f"{server} answers"] = name_of(error)
    return outcomes


def connect_files(known: list[str]) -> dict[str, str]:
    """Connect to known socket files, and to those found within a few seconds."""
    found = {path: _greeting(path) for path in known}
    until = time.monotonic() + _SEARCH_S
    for place in _SOCKET_PLACES:
        for folder, _, names in os.walk(place):
            paths = (os.path.join(folder, name) for name in names)
            for path in filter(_is_socket, paths):
                if len(found) < _MOST_SOCKETS:
                    found[path] = _greeting(path)
            if time.monotonic() > until:
                return found
    return found


def listeners() -> dict[str, str]:
    """Return the TCP ports with a listener in this network namespace."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        found.update(
            {str(int(row[1].rpartition(":")[2], 16)): "" for row in rows if row[3] == "0A"}
        )
    return found


def greetings(ports: list[int]) -> dict[str, str]:
    """Connect to ports of loopback and return the first data from each."""
    # Many services of a machine say nothing.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(pool.map(lambda port: (str(port), _greeting(("127.0.0.1", port))), ports))


def ask(port: int, requests: dict[str, bytes]) -> dict[str, str]:
    """Send raw HTTP requests to a port of loopback and return each response."""
    return {name: _ask(port, request) for name, request in requests.items()}


def raw_sockets() -> dict[str, str]:
    """Open sockets that read or forge packets."""
    kinds = {
        "a raw IPv4 socket": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "a raw IPv6 socket": (socket.AF_INET6, socket.SOCK_RAW, 58),
        "a packet socket": (_PACKET, socket.SOCK_RAW, 0x0300),
        "a cooked packet socket": (_PACKET, socket.SOCK_DGRAM, 0x0300),
    }
    return {name: _make_socket(*kind) for name, kind in kinds.items()}


def vsock() -> dict[str, str]:
    """Open a socket to the hypervisor."""
    return {"a socket to the hypervisor": _make_socket(_VSOCK, socket.SOCK_STREAM, 0)}


def configure() -> dict[str, str]:
    """Set the flags of loopback to their current value."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            request = struct.pack("16sH14x", b"lo", 0)
            fcntl.ioctl(sock, _SIOCSIFFLAGS, fcntl.ioctl(sock, _SIOCGIFFLAGS, request))
        except OSError as error:
            return {"setting an interface": name_of(error)}
    return {"setting an interface": "ok"}


def _state(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
        except OSError as error:
            return name_of(error)
    return "ok: it is up" if struct.unpack("16sH14x", answer)[1] & _IFF_UP else "down"


def _greeting(address: str | tuple[str, int]) -> str:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    if family == socket.AF_INET and ":" in address[0]:
        family = socket.AF_INET6
    with socket.socket(family) as sock:
        sock.settimeout(_WAIT_S)
        try:
            sock.connect(address)
        except OSError as error:
            return name_of(error)
        try:
            text = sock.recv(200).decode(errors="replace")
        except OSError:
            text = ""
    return f"ok: it answers {text!r}" if text else "ok"


def _ask(port: int, request: bytes) -> str:
    answer = b""
    with socket.socket() as sock:
        sock.settimeout(5)
        try:
            sock.connect(("127.0.0.1", port))
            sock.sendall(request)
            while True:
                piece = sock.recv(65536)
                if not piece:
                    break
                answer += piece
        except OSError as error:
            return answer.decode(errors="replace") or name_of(error)
    return answer.decode(errors="replace")


def _is_socket(path: str) -> bool:
    try:
        return os.stat(path).st_mode >> 12 == 0o14
    except OSError:
        return False


def _make_socket(family: int, kind: int, protocol: int) -> str:
    try:
        socket.socket(family, kind, protocol).close()
    except OSError as error:
        return name_of(error)
    return "ok"
