"""The process that makes one sandbox and answers for it: start, kill, expose, end.

It is a fork of the spawner, one per sandbox, joined to the controller by a socket. What it forks
is inside the sandbox, so a command costs one fork and one exec. When the controller goes away the
socket ends, the warden kills the sandbox's first process, and the kernel kills the rest.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swerl.chat import Json
from swerl.sandboxes import _boot as boot
from swerl.sandboxes import _cgroup as cgroup
from swerl.sandboxes import _child as child
from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes import _seccomp as seccomp
from swerl.sandboxes import _wire as wire
from swerl.sandboxes._wire import Command, Plan

_FIRST_PORT = 41414
_PRIORITY = -10
_STOP_ROUNDS = 2000
_FORK_ROUNDS = 100


def main(plan: Plan, channel: socket.socket, groups: Mapping[str, Path]) -> None:
    """Make a sandbox, report on `channel`, and serve it until the channel or its life ends."""
    deadline = time.monotonic() + plan.lifetime_s
    try:
        held = cgroup.enter(groups, plan)
        with suppress(PermissionError):  # a busy sandbox must not starve its warden
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        _limit(plan, held)
        booted = boot.boot(plan)
        _become_harmless()
        root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        wire.send(channel, {"failed": error.strerror or str(error), "errno": error.errno or 0})
        return
    fds = [root] if booted.upper is None else [root, booted.upper]
    wire.send(channel, {"ready": booted.pid, "limits": [*held]}, fds)
    for fd in fds:
        os.close(fd)
    _Warden(channel, booted.init, deadline).serve()


def _limit(plan: Plan, held: set[str]) -> None:
    """Bound what cgroups do not: memory per process, processes per user, no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wanted = {}
    if "memory" not in held:
        wanted[resource.RLIMIT_DATA] = plan.memory_mib << 20
    if "pids" not in held:
        wanted[resource.RLIMIT_NPROC] = plan.num_processes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _become_harmless() -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class _Warden:
    channel: socket.socket
    init: int
    deadline: float
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Process descriptor of a command's first process -> (its pid, the command's number)."""
    next_port: int = _FIRST_PORT
    filter: bytes | None = field(default_factory=seccomp.build)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.init, select.POLLIN)
        reason = self._serve_until_lost(poll)
        signal.pidfd_send_signal(self.init, signal.SIGKILL)
        # the first process ends only after every other one in its namespace has been reaped
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        if reason:
            wire.send(self.channel, {"lost": reason})

    def _serve_until_lost(self, poll: select.poll) -> str:
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                return "its lifetime is over"
            for fd, _ in poll.poll(min(left_s, 3600.0) * 1000 + 1):
                if fd == self.init or (fd in self.running and child.is_ending("/proc/1")):
                    return "its first process was killed"
                if fd in self.running:
                    self._finish(poll, fd)
                elif not self._answer(poll):
                    return ""

    def _answer(self, poll: select.poll) -> bool:
        packet = wire.receive(self.channel)
        if packet is None:
            return False
        body: dict[str, Any] = packet.body
        if "argv" in body:
            self._start(poll, Command(**body), packet.fds)
        elif "kill" in body:
            self._kill(int(body["kill"]))
        else:
            self._listen(int(body["listen"]))
        for fd in packet.fds:
            os.close(fd)
        return True

    def _start(self, poll: select.poll, command: Command, streams: list[int]) -> None:
        try:
            pid = _fork()
        except OSError as error:
            self._tell({"number": command.number, "refused": error.strerror})
            return
        if pid == 0:
            child.run(command, streams, self.filter)
        fd = os.pidfd_open(pid)
        self.running[fd] = (pid, command.number)
        poll.register(fd, select.POLLIN)

    def _finish(self, poll: select.poll, fd: int) -> None:
        pid, number = self.running.pop(fd)
        poll.unregister(fd)
        os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._tell({"number": number, "exit_code": code if code >= 0 else 128 - code})

    def _kill(self, number: int) -> None:
        """Kill every process of a command, daemons in sessions of their own included.

        All are stopped before one is killed: a stopped process holds its place under the process
        limit, so that not even a fork bomb can refill it.
        """
        for fd, (_, running) in self.running.items():
            if running == number:  # it may be too young to be marked
                signal.pidfd_send_signal(fd, signal.SIGSTOP)
        for _ in range(_STOP_ROUNDS):
            if not _signal_marked(number, signal.SIGSTOP, spared=b"TZX"):
                break
            time.sleep(0.001)
        _signal_marked(number, signal.SIGKILL, spared=b"ZX")
        for fd, (_, running) in self.running.items():
            if running == number:
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def _listen(self, number: int) -> None:
        """Make a listening socket inside, on a port of its own, and hand it out."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            for port in range(self.next_port, self.next_port + 100):
                try:
                    sock.bind(("127.0.0.1", port))
                    break
                except OSError:
                    continue
            sock.listen(128)
            self.next_port = sock.getsockname()[1] + 1
            wire.send(self.channel, {"number": number, "port": self.next_port - 1}, [sock.fileno()])

    def _tell(self, body: Mapping[str, Json]) -> None:
        with suppress(ConnectionError):  # a controller that is gone is noticed next
            wire.send(self.channel, body)


def _fork() -> int:
    """Fork; wait a little where the dead of a full sandbox are not reaped yet."""
    for _ in range(_FORK_ROUNDS):
        with suppress(BlockingIOError):
            return os.fork()
        time.sleep(0.005)
    return os.fork()


def _signal_marked(number: int, signum: signal.Signals, *, spared: bytes) -> bool:
    """Signal the command's processes that are in none of the spared states; say if there were."""
    found = False
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  paths cost a third more
        with suppress(OSError):  # it ended meanwhile
            fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                if child.mark_of(fd) == number and child.state_of(fd) not in spared:
                    signal.pidfd_send_signal(fd, signum)
                    found = True
            finally:
                os.close(fd)
    return found
