"""The process that makes one sandbox and answers for it: start, kill, expose, end.

It is a fork of the spawner, one per sandbox, joined to the controller by a socket. What it starts
is inside the sandbox, so a command costs one exec. When the controller goes away the socket ends,
the warden kills the sandbox's first process, and the kernel kills the rest.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swerl.core.chat import Json
from swerl.sandboxes._local import boot, cgroup, child, disk, kernel, seccomp, wire
from swerl.sandboxes._local.child import Launcher
from swerl.sandboxes._local.disk import Watcher
from swerl.sandboxes._local.wire import Command, Plan

_FIRST_PORT = 41414
_PRIORITY = -10
_STOP_S = 5.0
_DISK_IS_FULL = "it wrote more to disk than its disk_mib"


def main(plan: Plan, channel: socket.socket, groups: Mapping[str, Path]) -> None:
    """Make a sandbox, report on `channel`, and serve it until the channel or its life ends."""
    spawner = os.getppid()
    deadline = time.monotonic() + plan.lifetime_s
    try:
        held = cgroup.enter(groups, plan)
        plan = _keep_room(plan, held)
        with suppress(PermissionError):  # a busy sandbox must not starve its warden
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        launcher = Launcher()
        device = disk.make_device(plan)
        watcher = disk.watch(plan) if plan.scratch and device < 0 else None
        booted = boot.boot(plan, device)
        if device >= 0:
            os.close(device)  # its mount keeps it
        _limit(plan, held, watcher)  # inside, where the process limit counts this sandbox's alone
        if _become_harmless(launcher.password, spawner):
            held.add("syscalls")
        root = os.open("/", os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        wire.send(channel, wire.failure(error))
        return
    fds = [root] if booted.upper is None else [root, booted.upper]
    wire.send(channel, {"ready": booted.pid, "owner": booted.owner, "limits": [*held]}, fds)
    for fd in fds:
        os.close(fd)
    _Warden(channel, launcher, booted.init, deadline, watcher).serve()


def _keep_room(plan: Plan, held: set[str]) -> Plan:
    """Leave memory for processes where what a sandbox writes counts as its memory.

    Else files alone could fill it, and no command would find room to start and remove them.
    """
    if "memory" not in held or plan.scratch:
        return plan
    return replace(plan, disk_mib=min(plan.disk_mib, plan.memory_mib * 2 // 3))


def _limit(plan: Plan, held: set[str], watcher: Watcher | None) -> None:
    """Bound what cgroups do not: memory per process, processes per user, no core files.

    One byte of core is none in a file, and for a core_pattern that starts a program on the host
    the kernel takes it as an order not to; 0 would not stop that program.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    wanted = {resource.RLIMIT_FSIZE: plan.disk_mib << 20} if watcher else {}
    if "memory" not in held:
        wanted[resource.RLIMIT_DATA] = plan.memory_mib << 20
    if "pids" not in held:
        wanted[resource.RLIMIT_NPROC] = plan.num_processes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _become_harmless(password: int, spawner: int) -> bool:
    """Give up every right; say whether system calls are filtered from here on."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten where one's user changes
    if os.getppid() != spawner:
        os._exit(1)
    return seccomp.install(password)


@dataclass(slots=True)
class _Warden:
    channel: socket.socket
    launcher: Launcher
    init: int
    deadline: float
    watcher: Watcher | None = None
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Process descriptor of a command's first process -> (its pid, the command's number)."""
    next_port: int = _FIRST_PORT

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.init, select.POLLIN)
        if self.watcher:
            poll.register(self.watcher.said, select.POLLIN)
        reason = self._serve_until_lost(poll)
        signal.pidfd_send_signal(self.init, signal.SIGKILL)
        if self.watcher:
            os.kill(self.watcher.pid, signal.SIGKILL)
        # the first process ends only after every other one in its namespace has been reaped
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        if reason:
            from_inside = reason == _DISK_IS_FULL
            wire.send(self.channel, {"lost": reason, "from_inside": from_inside})

    def _serve_until_lost(self, poll: select.poll) -> str:
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                return "its lifetime is over"
            for fd, _ in poll.poll(min(left_s, 3600.0) * 1000 + 1):
                if fd == self.init or (fd in self.running and child.first_process_is_ending()):
                    return "its first process was killed"
                if self.watcher and fd == self.watcher.said:
                    if os.read(fd, 1):
                        return _DISK_IS_FULL
                    poll.unregister(fd)  # somebody killed it; a single file is still bounded
                    continue
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
            self._tell({"number": body["number"]})
        elif "signal" in body:
            self._signal(int(body["command"]), int(body["signal"]))
        else:
            self._listen(int(body["listen"]))
        for fd in packet.fds:
            os.close(fd)
        return True

    def _start(self, poll: select.poll, command: Command, streams: list[int]) -> None:
        try:
            pid = self.launcher.start(command, streams)
        except BlockingIOError as error:
            self._tell({"number": command.number, "refused": error.strerror})
        except (OSError, ValueError) as error:
            os.write(streams[2], child.complaint(error))
            code = child.exit_code_of(error, command)
            self._tell({"number": command.number, "exit_code": code})
        else:
            fd = os.pidfd_open(pid)
            self.running[fd] = (pid, command.number)
            poll.register(fd, select.POLLIN)

    def _finish(self, poll: select.poll, fd: int) -> None:
        pid, number = self.running.pop(fd)
        poll.unregister(fd)
        os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._tell({"number": number, "exit_code": code if code >= 0 else 128 - code})

    def _signal(self, number: int, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._kill(number)
        else:
            child.signal_marked(number, signum, spared=b"ZX")

    def _kill(self, number: int) -> None:
        """Kill every process of a command, daemons in sessions of their own included.

        All are stopped before one is killed: a stopped process holds its place under the process
        limit, so that not even a fork bomb can refill it.
        """
        give_up = time.monotonic() + _STOP_S
        while child.signal_marked(number, signal.SIGSTOP, spared=b"TZX"):
            if time.monotonic() > give_up:  # there is no process limit, and so no end
                break
            time.sleep(0.001)
        while child.signal_marked(number, signal.SIGKILL, spared=b"ZX"):
            if time.monotonic() > give_up:
                break
            time.sleep(0.001)

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
