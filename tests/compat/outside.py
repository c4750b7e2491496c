"""Run a command and log every attempt of its processes to reach something outside.

This file runs inside the sandbox, from its source, with Python's standard library alone:
`python3 outside.py LOG PROGRAM ARGUMENT…`. A system call filter reports each `connect` and `send…`
to this process before the kernel makes the call; the call then continues unchanged. So a program
behaves as it does without the filter, needs no privilege, and cannot bypass it, no matter how it is
linked. LOG gets a line `lookup NAME` for each DNS query, and a line `connect ADDRESS:PORT` for each
address that is not the sandbox's own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

_CALLS = {
    "x86_64": {"seccomp": 317, "connect": 42, "sendto": 44, "sendmsg": 46, "sendmmsg": 307},
    "aarch64": {"seccomp": 277, "connect": 203, "sendto": 206, "sendmsg": 211, "sendmmsg": 269},
}
_ALLOW, _NOTIFY = 0x7FFF_0000, 0x7FC0_0000
_SET_FILTER, _NEW_LISTENER = 1, 8
_SUBREAPER = 36
_RECEIVE, _ANSWER = 0xC050_2100, 0xC018_2101
_GO_ON = 1
_MOST_BYTES = 512
"""Bytes of a message that are read; a DNS query is shorter."""
_MOST_MESSAGES = 8
_MESSAGE_BYTES = 64
"""Size of a `mmsghdr`."""


def main(log: str, argv: list[str]) -> None:
    """Run the command under the filter and exit with its exit code."""
    calls = _CALLS[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    listener = _watch(libc, calls)
    child = os.fork()
    if child == 0:
        os.close(listener)
        _become(argv)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda signum, _: os.kill(child, signum))
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    watcher = _Watcher(listener, written, {calls[name]: name for name in calls})
    watcher.follow(child)
    _, status = os.waitpid(child, 0)
    if _has_children() and os.fork() == 0:  # processes that the command left behind stay watched
        for stream in range(3):
            os.close(stream)
        watcher.follow(None)
    _exit_like(status)


class _Watcher:
    """Answer the filter's reports."""

    def __init__(self, listener: int, log: int, names: dict[int, str]) -> None:
        self._listener = listener
        self._log = log
        self._names = names

    def follow(self, child: int | None) -> None:
        """Answer until the child has ended; without a child, for ever."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if child is not None:
            poll.register(os.pidfd_open(child), select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._listener in ready:
                with suppress(OSError):  # the caller was killed meanwhile
                    self._answer()
            elif ready:
                return

    def _answer(self) -> None:
        report = bytearray(80)
        fcntl.ioctl(self._listener, _RECEIVE, report)
        number, pid = struct.unpack_from("=QI", report)
        call, _, _, *given = struct.unpack_from("=iIQ6Q", report, 16)
        with suppress(OSError):
            memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
            try:
                self._note(self._names[call], _Memory(memory), given)
            finally:
                os.close(memory)
        fcntl.ioctl(self._listener, _ANSWER, bytearray(struct.pack("=QqiI", number, 0, 0, _GO_ON)))

    def _note(self, name: str, memory: _Memory, given: list[int]) -> None:
        _, at, size, _, to, to_size = given
        if name == "connect":
            self._log_address(memory.read(at, size))
        elif name == "sendto":
            self._log_message(memory.read(at, size), memory.read(to, to_size))
        elif name == "sendmsg":
            self._log_message(*memory.message(at))
        else:
            for place in range(min(size, _MOST_MESSAGES)):
                self._log_message(*memory.message(at + place * _MESSAGE_BYTES))

    def _log_message(self, data: bytes, address: bytes) -> None:
        if name := question(data):
            self._write(f"lookup {name}")
        else:
            self._log_address(address)

    def _log_address(self, address: bytes) -> None:
        if far := far_address(address):
            self._write(f"connect {far}")

    def _write(self, line: str) -> None:
        os.write(self._log, line.encode() + b"\n")


class _Memory:
    """Read the memory of a process that waits for an answer."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self, at: int, size: int) -> bytes:
        """Return at most the first 512 bytes; none at address 0."""
        return os.pread(self._file, min(size, _MOST_BYTES), at) if at else b""

    def message(self, at: int) -> tuple[bytes, bytes]:
        """Return the data and the address of a `msghdr`."""
        header = os.pread(self._file, 32, at)
        name, name_size, parts, num_parts = struct.unpack("=QI4xQQ", header)
        if not num_parts:
            return b"", self.read(name, name_size)
        base, size = struct.unpack("=QQ", os.pread(self._file, 16, parts))
        return self.read(base, size), self.read(name, name_size)


def question(data: bytes) -> str:
    """Return the name in a DNS query; empty if the bytes are no query."""
    if len(data) < 17:
        return ""
    _, flags, questions, answers, authorities, _ = struct.unpack_from(">6H", data)
    if flags & 0xF800 or (questions, answers, authorities) != (1, 0, 0):
        return ""
    labels = list(_labels(data, 12))
    end = 12 + sum(len(label) + 1 for label in labels) + 1
    if not labels or len(data) < end + 4 or data[end - 1] or data[end + 2 : end + 4] != b"\0\1":
        return ""
    with suppress(UnicodeDecodeError):
        return b".".join(labels).decode("ascii").lower()
    return ""


def _labels(data: bytes, at: int) -> Iterator[bytes]:
    while at < len(data) and 0 < data[at] < 64:
        yield data[at + 1 : at + 1 + data[at]]
        at += data[at] + 1


def far_address(address: bytes) -> str:
    """Return an internet address with its port; empty if it is the sandbox's own."""
    if len(address) < 8:
        return ""
    (family,) = struct.unpack_from("=H", address)
    (port,) = struct.unpack_from(">H", address, 2)
    if family == socket.AF_INET:
        return "" if address[4] in (0, 127) else f"{socket.inet_ntoa(address[4:8])}:{port}"
    if family == socket.AF_INET6 and len(address) >= 24:
        raw = address[8:24]
        if raw[:12] == bytes(10) + b"\xff\xff":  # IPv4 mapped to IPv6
            return far_address(struct.pack("=H", socket.AF_INET) + address[2:4] + raw[12:])
        near = raw in (bytes(16), bytes(15) + b"\1")
        return "" if near else f"[{socket.inet_ntop(socket.AF_INET6, raw)}]:{port}"
    return ""


def _watch(libc: ctypes.CDLL, calls: dict[str, int]) -> int:
    """Install the filter and return the descriptor of its reports."""
    names = [name for name in calls if name != "seccomp"]
    code = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    code += [
        struct.pack("HBBI", 0x15, len(names) - place, 0, calls[name])
        for place, name in enumerate(names)
    ]
    code += [struct.pack("HBBI", 0x06, 0, 0, value) for value in (_ALLOW, _NOTIFY)]
    text = b"".join(code)
    buffer = ctypes.create_string_buffer(text, len(text))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    listener = int(libc.syscall(calls["seccomp"], _SET_FILTER, _NEW_LISTENER, program))
    if listener < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot watch system calls: {os.strerror(error)}")
    return listener


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _become(argv: list[str]) -> None:
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(126)


def _exit_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
