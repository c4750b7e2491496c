"""The supervisor of one sandbox: makes it, starts and signals its commands, ends it.

The spawner forks one per sandbox and connects it to the controller by a socket. The supervisor
joins the sandbox's namespaces, so a command costs one fork and one exec. It keeps its own place in
the process tree, so nothing inside can see it. When the controller exits, the socket closes, the
supervisor kills the sandbox's init process, and the kernel kills the rest.

The fork that becomes a command can be seen inside before it calls exec. It is a copy of the
supervisor with descriptors of the outside, but it is not dumpable, so the kernel opens neither its
memory nor its descriptors to anybody inside; and it closes them before it does anything else. Its
memory is its own, so what a command does with its program's file delays no one but itself.

Every process of a command carries a mark: the soft RLIMIT_LOCKS. Linux no longer enforces this
resource limit but still copies it to every child, also to one that starts its own session.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from swerl.core.chat import Json
from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes._local import boot, limits, seccomp, wire
from swerl.sandboxes._local.wire import ALL_COMMANDS, Command, SandboxPlan

_FIRST_PORT = 41414
_PRIORITY = -10
_STOP_S = 5.0
_LONGEST_POLL_S = 3600.0

_RLIMIT_LOCKS = 10
_MARK_BASE = 1 << 40
_PF_EXITING = 4
_OOM_SCORE = 500
"""Under memory pressure the kernel kills a command before the supervisor, whose score is 0."""
_ROOT_SPACE = 3
"""Number of the descriptor of the user namespace of `root` in a command before it calls exec."""
_NOT_STARTED, _NOT_FOUND = 126, 127
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores and a command must not."""


def main(plan: SandboxPlan, channel: socket.socket, groups: Mapping[str, Path]) -> None:
    """Make a sandbox, report it on `channel`, and serve it until the channel or its life ends."""
    spawner = os.getppid()
    deadline = time.monotonic() + plan.lifetime_s
    try:
        # First, so that everything below counts toward the sandbox's limits.
        held = limits.enter(groups, plan)
        plan = _reserve_memory(plan, held)
        with suppress(PermissionError):  # a busy sandbox must not starve its supervisor
            os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
        # Before `boot`, because it opens a file of the host's /proc.
        launcher = _Launcher()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a command may get it before its exec
        for name in _IGNORED:
            signal.signal(name, lambda *_: None)  # unlike `ignore`, exec resets a handler
        booted = boot.boot(plan)
        # from here on this process is inside: the process limit counts this sandbox's user only
        limits.limit_processes(plan, held)
        if _drop_privileges(launcher.password, spawner):
            held.add("syscalls")
        root = os.open("/", os.O_PATH | os.O_DIRECTORY)
        # By descriptor: code inside may lock the folder above.
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        wire.send(channel, wire.failure(error))
        return
    fds = [root] if booted.upper is None else [root, booted.upper]
    wire.send(channel, {"ready": booted.pid, "owner": booted.owner, "limits": [*held]}, fds)
    for fd in fds:
        os.close(fd)
    launcher.root_space = booted.root_space
    _Supervisor(channel, launcher, booted.init, proc, deadline).serve()


def _reserve_memory(plan: SandboxPlan, held: set[str]) -> SandboxPlan:
    """Lower the disk limit if files count as the sandbox's memory.

    Otherwise files alone could fill the memory, and no command could start to remove them.
    """
    if "memory" not in held or plan.scratch:
        return plan
    return replace(plan, disk_mib=min(plan.disk_mib, plan.memory_mib * 2 // 3))


def _drop_privileges(password: int, spawner: int) -> bool:
    """Give up every privilege; return whether a filter restricts system calls from here on."""
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user resets it
    if os.getppid() != spawner:
        os._exit(1)
    return seccomp.install(password)


@dataclass(slots=True)
class _Supervisor:
    channel: socket.socket
    launcher: _Launcher
    init: int
    """Process descriptor of the sandbox's init process."""
    proc: int
    """Descriptor of the sandbox's /proc."""
    deadline: float
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Process descriptor of a command's first process -> (its pid, the command's number)."""
    next_port: int = _FIRST_PORT

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        poll.register(self.init, select.POLLIN)
        reason = self._serve_until_lost(poll)
        # The kernel kills every process of the pid namespace together with its init process.
        signal.pidfd_send_signal(self.init, signal.SIGKILL)
        # the init process ends only after every other process in its namespace has been reaped
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        if reason:
            self._reply({"lost": reason})

    def _serve_until_lost(self, poll: select.poll) -> str:
        """Serve requests; return why the sandbox is lost, empty if the controller closed it."""
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                return "its lifetime is over"
            for fd, _ in poll.poll(min(left_s, _LONGEST_POLL_S) * 1000 + 1):
                if fd == self.init or (fd in self.running and _init_is_ending(self.proc)):
                    return "its init process was killed"
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
            self._reply({"number": body["number"]})
        elif "signal" in body:
            self._signal(int(body["command"]), int(body["signal"]))
            if "number" in body:
                self._reply({"number": body["number"]})
        else:
            self._listen(int(body["listen"]))
        for fd in packet.fds:
            os.close(fd)
        return True

    def _start(self, poll: select.poll, command: Command, streams: list[int]) -> None:
        try:
            pid = self.launcher.start(command, streams)
        except BlockingIOError as error:
            self._reply({"number": command.number, "refused": error.strerror})
        except (OSError, ValueError) as error:
            # In a dying pid namespace the kernel refuses new processes (ENOMEM). An exit code
            # would become a verdict, so the loss of the sandbox answers this command.
            if _init_is_ending(self.proc):
                return
            # The command cannot start: report that as a shell would.
            os.write(streams[2], _start_error(error))
            self._reply({"number": command.number, "exit_code": _exit_code(error, command)})
        else:
            fd = os.pidfd_open(pid)
            self.running[fd] = (pid, command.number)
            poll.register(fd, select.POLLIN)

    def _finish(self, poll: select.poll, fd: int) -> None:
        pid, number = self.running.pop(fd)
        poll.unregister(fd)
        os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._reply({"number": number, "exit_code": code if code >= 0 else 128 - code})

    def _signal(self, number: int, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._kill(number)
        elif number == ALL_COMMANDS and signum == signal.SIGSTOP:
            self._stop(number)
        else:
            _signal_marked(self.proc, number, signum, skipped=b"ZX")

    def _kill(self, number: int) -> None:
        """Kill every process of a command, including daemons in sessions of their own.

        All are stopped before the first is killed. A stopped process still counts toward the
        process limit, so even a fork bomb cannot start new ones.
        """
        give_up = self._stop(number)
        while _signal_marked(self.proc, number, signal.SIGKILL, skipped=b"ZX"):
            if time.monotonic() > give_up:
                break
            time.sleep(0.001)

    def _stop(self, number: int) -> float:
        """Stop every process of a command; return the time until which that may take."""
        give_up = time.monotonic() + _STOP_S
        while _signal_marked(self.proc, number, signal.SIGSTOP, skipped=b"TZX"):
            if time.monotonic() > give_up:  # without a process limit this may never end
                break
            time.sleep(0.001)
        return give_up

    def _listen(self, number: int) -> None:
        """Listen inside the sandbox on a new port, and send the socket to the controller."""
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

    def _reply(self, body: Mapping[str, Json]) -> None:
        with suppress(ConnectionError):  # the next poll notices that the controller is gone
            wire.send(self.channel, body)


class _Launcher:
    """Starts commands inside; created while the supervisor still sees the host's /proc."""

    def __init__(self) -> None:
        self.password = int.from_bytes(os.urandom(8), "little")
        """Lets a command of `root` enter its user namespace despite the system call filter."""
        self.root_space = -1
        """Descriptor of the user namespace of `root`."""
        self._oom = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        self._own_score = int(os.read(self._oom, 8))

    def start(self, command: Command, streams: Sequence[int]) -> int:
        """Start a command and return its pid. Raises OSError, or ValueError on a bad argument."""
        # The new process inherits the folder.
        os.chdir(command.cwd)
        try:
            path = _find_program(command)
            # The new process inherits the command's mark and OOM score, too.
            own, hard = resource.getrlimit(_RLIMIT_LOCKS)
            resource.setrlimit(_RLIMIT_LOCKS, (_MARK_BASE + command.number, hard))
            self._set_score(max(_OOM_SCORE, self._own_score))
            try:
                pid = kernel.retry_at_process_limit(os.fork)
                if pid == 0:
                    self._become(path, command, streams)
            finally:
                self._set_score(self._own_score)
                resource.setrlimit(_RLIMIT_LOCKS, (own, hard))
            with suppress(OSError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, pid, 0)
            return pid
        finally:
            os.chdir("/")

    def _become(self, path: str, command: Command, streams: Sequence[int]) -> NoReturn:
        """Become a command. As root its user is number 0, in another user namespace."""
        try:
            self._keep_only(streams)
            os.setsid()
            if command.as_root:
                kernel.setns(_ROOT_SPACE, kernel.NEWUSER, self.password)
                kernel.drop_capabilities()
            os.close(_ROOT_SPACE)
            os.execve(path, list(command.argv), command.env)
        except (OSError, ValueError) as error:
            os.write(2, _start_error(error))
            os._exit(_exit_code(error, command))
        finally:
            os._exit(_NOT_STARTED)

    def _keep_only(self, streams: Sequence[int]) -> None:
        """Close every descriptor but the command's streams and the user namespace of `root`."""
        for number, fd in enumerate((*streams, self.root_space)):
            os.dup2(fd, number)
        os.closerange(_ROOT_SPACE + 1, kernel.MAX_DESCRIPTORS)

    def _set_score(self, score: int) -> None:
        with suppress(PermissionError):
            os.pwrite(self._oom, str(score).encode(), 0)


def _find_program(command: Command) -> str:
    """Return the path of the command's program, as execvp would find it."""
    if not command.argv:
        raise ValueError("no program to run")
    name = command.argv[0]
    if "/" in name:
        return name
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    for folder in command.env.get("PATH", "").split(":"):
        path = f"{folder or '.'}/{name}"
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
        if os.path.exists(path):
            failure = PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    raise failure


def _start_error(error: Exception) -> bytes:
    """Return the text on standard error of a command that cannot start."""
    text = str(error)
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    return f"swerl: {text}\n".encode(errors="replace")


def _exit_code(error: Exception, command: Command) -> int:
    """Return a shell's exit code for a command that cannot start."""
    if isinstance(error, FileNotFoundError) and error.filename != command.cwd:
        return _NOT_FOUND
    return _NOT_STARTED


def _signal_marked(proc: int, number: int, signum: int, *, skipped: bytes) -> bool:
    """Signal the processes of a command, except those in the `skipped` states.

    Returns whether one of them can still run. A process in uninterruptible sleep (a parent until
    its new child has called exec, for example) gets the signal before it runs again.
    """
    found = False
    for name in filter(str.isdigit, os.listdir(proc)):
        if name == "1":
            continue
        with suppress(OSError):  # it ended meanwhile
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
            try:
                is_meant = number == ALL_COMMANDS or _mark_of(fd) == number
                if is_meant and (state := _stat(fd)[0]) not in skipped:
                    signal.pidfd_send_signal(fd, signum)
                    found = found or state != b"D"
            finally:
                os.close(fd)
    return found


def _init_is_ending(proc: int) -> bool:
    try:
        return bool(int(_stat(proc, "1/stat")[6]) & _PF_EXITING)
    except OSError:
        return True


def _mark_of(folder: int) -> int:
    """Return the number of the command that a process belongs to, from its /proc folder."""
    for line in kernel.read("limits", folder=folder).splitlines():
        if line.startswith(b"Max file locks"):
            soft = line.split()[3]
            return 0 if soft == b"unlimited" else int(soft) - _MARK_BASE
    return 0


def _stat(folder: int, name: str = "stat") -> list[bytes]:
    """Return the fields of `stat` in a /proc folder after the program's name, the state first."""
    return kernel.read(name, folder=folder).rpartition(b")")[2].split()
