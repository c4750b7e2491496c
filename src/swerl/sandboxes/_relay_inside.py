"""The relay's half inside a sandbox: one server, and a bridge process per exec stream.

The image's own Python runs this text, from version 3.6 on, so it uses nothing newer and no package.
`serve NAME PORT` listens on 127.0.0.1 and goes to the background. `carry NAME` connects its own
stdin and stdout to that server, through an abstract socket that only the same user may use; the
latest bridge is the link. Without a server it exits with 3.

The server keeps every frame until the other half acknowledges it, and resends what a broken link
lost. `_relay.py` describes the lines.
"""

import base64
import collections
import contextlib
import os
import selectors
import socket
import struct
import sys
import threading

WINDOW = 1 << 19
CHUNK = 24 * 1024
MAX_CONNECTIONS = 128
NO_SERVER = 3

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class ClientConnection:
    """One connection of a program in the sandbox."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        self.credit = WINDOW
        self.pending = bytearray()
        self.closing = False  # the other half sends no more
        self.read_ended = False
        self.write_ended = False


class RelayServer:
    """Accepts connections and exchanges frames with the controller over the latest link."""

    def __init__(self, listener: socket.socket, control: socket.socket) -> None:
        self.listener = listener
        self.control = control
        self.connections = {}  # type: dict[int, ClientConnection]
        self.last_number = 0
        self.link = None  # type: socket.socket | None
        self.link_in = bytearray()
        self.link_out = bytearray()
        self.greeted = False  # frames wait until the other half has acknowledged the earlier ones
        self.unacknowledged = collections.deque()  # type: collections.deque[tuple[int, bytes]]
        self.sent = 0
        self.received = 0
        self.must_acknowledge = False
        self.selector = selectors.DefaultSelector()

    def run(self) -> None:
        self.selector.register(self.control, READ, self.on_control)
        while True:
            self.poll_all()
            for key, events in self.selector.select():
                key.data(events)

    def poll_all(self) -> None:
        """Poll for exactly the events that there is space for."""
        room = len(self.connections) < MAX_CONNECTIONS
        self.poll_for(self.listener, READ if room else 0, self.on_client)
        if self.link:
            out = self.link_out or self.must_acknowledge
            self.poll_for(self.link, READ | (WRITE if out else 0), self.on_link)
        for each in self.connections.values():
            events = 0 if each.read_ended or each.credit <= 0 else READ
            events |= WRITE if each.pending or (each.closing and not each.write_ended) else 0
            self.poll_for(each.sock, events, lambda got, each=each: self.on_connection(each, got))

    def poll_for(self, sock: socket.socket, events: int, call: object) -> None:
        known = self.selector.get_map().get(sock.fileno())
        if not events:
            if known:
                self.selector.unregister(sock)
        elif not known:
            self.selector.register(sock, events, call)
        elif known.events != events:
            self.selector.modify(sock, events, call)

    def on_control(self, _events: int) -> None:
        sock, _ = self.control.accept()
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.getuid():
            sock.close()
            return
        self.drop_link()
        sock.setblocking(False)
        self.link = sock
        self.send_line(b"H %d" % self.received)

    def on_client(self, _events: int) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return  # the client is gone already
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.last_number += 1
        self.connections[self.last_number] = ClientConnection(sock, self.last_number)
        self.send_frame(b"O", self.last_number)

    def on_connection(self, each: ClientConnection, events: int) -> None:
        try:
            if events & WRITE and each.number in self.connections:
                self.write_to(each)
            if events & READ and each.number in self.connections:
                self.read_from(each)
        except BlockingIOError:
            return
        except OSError:
            self.send_frame(b"R", each.number)
            self.forget(each)

    def write_to(self, each: ClientConnection) -> None:
        if each.pending:
            count = each.sock.send(each.pending)
            del each.pending[:count]
            self.send_frame(b"W", each.number, b"%d" % count)
        if each.closing and not each.pending:
            each.sock.shutdown(socket.SHUT_WR)
            each.write_ended = True
            self.end_if_done(each)

    def read_from(self, each: ClientConnection) -> None:
        data = each.sock.recv(min(CHUNK, each.credit))
        if data:
            each.credit -= len(data)
            self.send_frame(b"D", each.number, base64.b64encode(data))
        else:
            each.read_ended = True
            self.send_frame(b"E", each.number)
            self.end_if_done(each)

    def end_if_done(self, each: ClientConnection) -> None:
        if each.read_ended and each.write_ended:
            self.forget(each)

    def forget(self, each: ClientConnection) -> None:
        self.poll_for(each.sock, 0, None)
        each.sock.close()
        self.connections.pop(each.number, None)

    def on_link(self, events: int) -> None:
        try:
            if events & READ and self.link:
                data = self.link.recv(1 << 16)
                if not data:
                    self.drop_link()
                    return
                self.take(data)
            if events & WRITE and self.link:
                if self.must_acknowledge:
                    self.must_acknowledge = False
                    self.send_line(b"A %d" % self.received)
                count = self.link.send(self.link_out[: 1 << 16])
                del self.link_out[:count]
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self.drop_link()

    def drop_link(self) -> None:
        if self.link:
            self.poll_for(self.link, 0, None)
            self.link.close()
        self.link = None
        self.greeted = False
        del self.link_in[:]
        del self.link_out[:]

    def take(self, data: bytes) -> None:
        self.link_in += data
        *lines, rest = self.link_in.split(b"\n")
        self.link_in = rest
        for line in lines:
            words = bytes(line).split(b" ")
            if words[0] in (b"A", b"H"):
                self.acknowledge(int(words[1]))
                if words[0] == b"H":
                    self.greeted = True
                    for _, text in self.unacknowledged:
                        self.link_out += text
            elif words[0] == b"P":
                self.must_acknowledge = True
            elif words[0] == b"F":
                self.must_acknowledge = True
                number = int(words[1])
                if number == self.received + 1:
                    self.received = number
                    self.handle(words[2], int(words[3]), words[4])
                elif number > self.received:
                    raise ValueError("a frame is missing")

    def acknowledge(self, upto: int) -> None:
        while self.unacknowledged and self.unacknowledged[0][0] <= upto:
            self.unacknowledged.popleft()

    def handle(self, kind: bytes, number: int, payload: bytes) -> None:
        each = self.connections.get(number)
        if each is None:
            return
        if kind == b"D":
            each.pending += base64.b64decode(payload)
        elif kind == b"W":
            each.credit += int(payload)
        elif kind == b"E":
            each.closing = True
        elif kind == b"R":
            linger = struct.pack("ii", 1, 0)
            each.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.forget(each)

    def send_frame(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        self.sent += 1
        text = b"F %d %s %d %s\n" % (self.sent, kind, number, payload)
        self.unacknowledged.append((self.sent, text))
        if self.greeted:
            self.link_out += text

    def send_line(self, line: bytes) -> None:
        self.link_out += line + b"\n"


def serve(name: str, port: int) -> None:
    """Listen, print the port, and continue in the background."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    listener.setblocking(False)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    control.bind("\0" + name)
    control.listen(8)
    sys.stdout.write(str(listener.getsockname()[1]) + "\n")
    sys.stdout.flush()
    for is_second in (False, True):
        if os.fork():
            os._exit(0)
        if not is_second:
            os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    RelayServer(listener, control).run()


def carry(name: str) -> None:
    """Connect stdin and stdout to the server until either side ends."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + name)
    except OSError:
        os._exit(NO_SERVER)

    def inward() -> None:
        with contextlib.suppress(OSError):
            while True:
                data = os.read(0, 1 << 16)
                if not data:
                    break
                sock.sendall(data)
        os._exit(0)

    threading.Thread(target=inward, daemon=True).start()
    with contextlib.suppress(OSError):
        while True:
            data = sock.recv(1 << 16)
            if not data:
                break
            while data:
                data = data[os.write(1, data) :]
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        carry(sys.argv[2])
