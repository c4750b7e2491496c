"""The small process that forks one supervisor per sandbox and cleans up after it.

The backend starts it once, as `python -I -S`. It has nothing of the controller's memory or
environment. It exits after the controller has exited and the last sandbox is cleaned up.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.core.sandbox import folder_owner_lives
from swerl.sandboxes import _kernel as kernel
from swerl.sandboxes._local import limits, seccomp, stage, supervisor, wire
from swerl.sandboxes._local.wire import SandboxPlan

_RETRY_MS, _TRIES = 20, 500


def main(fd: int) -> None:
    """Serve the controller on the socket `fd` until it closes; then end all sandboxes."""
    os.umask(0o022)
    with suppress(PermissionError):
        os.setgroups([])
    gc.disable()
    gc.freeze()  # forks share memory that no collection touches
    groups = limits.find()
    dead = [path.name for path in limits.leftovers(groups) if not folder_owner_lives(path)]
    own_users = stage.can_change_user()
    # What these return is made once, for all sandboxes.
    stage.machine_files()
    kernel.command_line_place()
    seccomp.denials(os.uname().machine)
    _Spawner(socket.socket(fileno=fd), groups, dict.fromkeys(dead, _TRIES), own_users).serve()


@dataclass(slots=True)
class _Spawner:
    channel: socket.socket
    groups: dict[str, Path]
    dead: dict[str, int]
    """Sandboxes whose cgroups remain to be removed -> number of tries left."""
    own_users: bool
    """True if each sandbox has its own user on the host."""
    supervisors: dict[int, tuple[int, SandboxPlan]] = field(default_factory=dict)
    verdicts: dict[int, int] = field(default_factory=dict)
    """Process descriptor of a supervisor -> the pipe that tells whose fault its end was."""

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        listening = True
        while True:
            # The kernel refuses to remove a group for a short time after its last process.
            self.dead = {
                name: tries - 1
                for name, tries in self.dead.items()
                if tries and not limits.remove(self.groups, name)
            }
            if not (listening or self.supervisors or self.dead):
                return
            for fd, _ in poll.poll(_RETRY_MS if self.dead else None):
                if fd in self.supervisors:
                    poll.unregister(fd)
                    self._clean_up(fd)
                elif not self._spawn(poll):
                    poll.unregister(self.channel)
                    listening = False
                    # The controller is gone, so all of its sandboxes end.
                    for pid, _ in self.supervisors.values():
                        os.kill(pid, signal.SIGKILL)

    def _spawn(self, poll: select.poll) -> bool:
        packet = wire.receive(self.channel)
        if packet is None:
            return False
        plan = SandboxPlan(**packet.body)  # type: ignore[arg-type]
        if self.own_users:
            plan = replace(plan, host_id=stage.host_id_of(plan.id))
        spawner = os.getpid()
        with socket.socket(fileno=packet.fds[0]) as channel:
            try:
                if plan.scratch:
                    Path(plan.scratch).mkdir(mode=0o700)
                pid = os.fork()
            except OSError as error:
                os.close(packet.fds[1])
                wire.send(channel, wire.failure(error))
                return True
            if pid == 0:
                self._run_supervisor(plan, channel, spawner)
        fd = os.pidfd_open(pid)
        self.supervisors[fd] = (pid, plan)
        self.verdicts[fd] = packet.fds[1]
        poll.register(fd, select.POLLIN)
        return True

    def _run_supervisor(self, plan: SandboxPlan, channel: socket.socket, spawner: int) -> None:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != spawner:  # it died before the line above
                return
            # Without the image: code inside can read it of the fork that becomes a command.
            kernel.set_command_line(kernel.SUPERVISOR_TITLE, plan.id)
            os.closerange(3, channel.fileno())
            os.closerange(channel.fileno() + 1, kernel.MAX_DESCRIPTORS)
            supervisor.main(plan, channel, self.groups)
        finally:
            os._exit(0)

    def _clean_up(self, fd: int) -> None:
        pid, plan = self.supervisors.pop(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        # The kernel's counters alone decide: nothing of the sandbox can write this pipe.
        with suppress(OSError):  # the controller is gone
            counts = limits.memory_counts(self.groups, plan.id)
            is_own = counts.kills > 0 and counts.hits > 0
            os.write(self.verdicts[fd], wire.FROM_INSIDE if is_own else wire.FROM_OUTSIDE)
        os.close(self.verdicts.pop(fd))
        self.dead[plan.id] = _TRIES
        if plan.scratch:
            import shutil

            shutil.rmtree(plan.scratch, ignore_errors=True)
