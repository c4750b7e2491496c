"""The small process that forks a warden per sandbox and clears away after it.

It is started once per backend as `python -I -S`, holds nothing of the controller's memory or
environment, and ends when the controller has gone and the last sandbox is cleared away.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from swerl.sandboxes._local import census, cgroup, identity, kernel, title, warden, wire
from swerl.sandboxes._local.wire import Plan

_RETRY_MS, _TRIES = 20, 500


def main(fd: int) -> None:
    """Serve the controller on the socket `fd` until it closes; then end what is left."""
    os.umask(0o022)
    with suppress(PermissionError):
        os.setgroups([])
    gc.disable()
    gc.freeze()  # forks share memory that nothing touches
    groups = cgroup.find()
    dead = [path.name for path in cgroup.leftovers(groups) if not census.owner_lives(path)]
    others = identity.can_be_other()
    _Spawner(socket.socket(fileno=fd), groups, dict.fromkeys(dead, _TRIES), others).serve()


@dataclass(slots=True)
class _Spawner:
    channel: socket.socket
    groups: dict[str, Path]
    dead: dict[str, int]
    """Sandboxes whose cgroups are still to be removed -> how often to try yet."""
    others: bool
    """Whether sandboxes are users of their own on the host."""
    wardens: dict[int, tuple[int, Plan]] = field(default_factory=dict)

    def serve(self) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        listening = True
        while True:
            self.dead = {
                name: tries - 1
                for name, tries in self.dead.items()
                if tries and not cgroup.remove(self.groups, name)
            }
            if not (listening or self.wardens or self.dead):
                return
            for fd, _ in poll.poll(_RETRY_MS if self.dead else None):
                if fd in self.wardens:
                    poll.unregister(fd)
                    self._clear(fd)
                elif not self._spawn(poll):
                    poll.unregister(self.channel)
                    listening = False
                    for pid, _ in self.wardens.values():
                        os.kill(pid, signal.SIGKILL)

    def _spawn(self, poll: select.poll) -> bool:
        packet = wire.receive(self.channel)
        if packet is None:
            return False
        plan = Plan(**packet.body)  # type: ignore[arg-type]
        if self.others:
            plan = replace(plan, host_id=identity.of(plan.id))
        spawner = os.getpid()
        with socket.socket(fileno=packet.fds[0]) as channel:
            try:
                if plan.scratch:
                    Path(plan.scratch).mkdir(mode=0o700)
                pid = os.fork()
            except OSError as error:
                wire.send(channel, wire.failure(error))
                return True
            if pid == 0:
                self._run_warden(plan, channel, spawner)
        fd = os.pidfd_open(pid)
        self.wardens[fd] = (pid, plan)
        poll.register(fd, select.POLLIN)
        return True

    def _run_warden(self, plan: Plan, channel: socket.socket, spawner: int) -> None:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != spawner:  # it died before the line above
                return
            title.write(title.WARDEN, plan.id, plan.image)
            for fd in (self.channel.fileno(), *self.wardens):
                os.close(fd)
            warden.main(plan, channel, self.groups)
        finally:
            os._exit(0)

    def _clear(self, fd: int) -> None:
        pid, plan = self.wardens.pop(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        self.dead[plan.id] = _TRIES
        if plan.scratch:
            shutil.rmtree(plan.scratch, ignore_errors=True)
