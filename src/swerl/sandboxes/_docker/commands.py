"""The commands of one container: start them under a mark, signal them, learn how they ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.sandboxes._docker import scripts
from swerl.sandboxes._docker.keeper import Keeper, Marks, Ready
from swerl.sandboxes._docker.machine import Machine
from swerl.sandboxes._docker.process import DockerProcess, new_token

_BEGIN_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0
_LOSS_TIMEOUT_S = 0.5
_END_TIMEOUT_S = 10.0
"""How long after its stream a command's end may become known."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
"""Pauses between questions whether a command has ended; each is twice the one before."""
_ROOT_ENV = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
_NUL = ["sh", "-c", "echo 'swerl: an argument holds a nul byte' >&2; exit 126"]


class Commands:
    """Starts commands in a container that stands."""

    def __init__(self, machine: Machine, ready: Ready) -> None:
        self.user_is_root = ready.user_id == 0
        names = (None, ready.user_name, str(ready.user_id))
        self._users = {"root": True, "0": True, **dict.fromkeys(names, self.user_is_root)}
        self._user_env = {"USER": ready.user_name, "LOGNAME": ready.user_name}
        self._machine = machine
        self._marks = Marks()
        self._running: set[DockerProcess] = set()
        self._root_keeper: Keeper | None = None
        machine.lost.add_done_callback(self._lose)

    def is_root(self, user: str | None) -> bool:
        """Say whether this name means root. Raises SandboxError where it means nobody."""
        if user not in self._users:
            raise SandboxError(
                f"no user {user!r} in sandbox {self._machine.name}",
                hint="name `root`, or nobody for the image's own user",
            )
        return self._users[user]

    async def launch(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        as_root: bool = False,
        with_input: bool = False,
    ) -> DockerProcess:
        """Start a command. Raises SandboxLostError, or SandboxError where there is no room."""
        words = _NUL if any("\0" in word for word in argv) else list(argv)
        request = {
            "environment": {**(_ROOT_ENV if as_root else self._user_env), **(env or {})},
            "user": "root" if as_root and not self.user_is_root else "",
            "stdin": with_input,
        }
        folder = cwd or self._machine.plan.workdir
        starting = asyncio.ensure_future(self._launch([folder, *words], request, as_root=as_root))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._machine.do(self._undo(starting))
            raise

    async def kill(self, process: DockerProcess) -> None:
        """End a command whatever it does; one that cannot be killed takes the sandbox along.

        Raises SandboxLostError where the sandbox was gone before.
        """
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.kill()
        except TimeoutError:
            await self._machine.close("a command did not die when it was killed")

    def kill_soon(self, process: DockerProcess) -> None:
        """Kill a command and let go of it, where no wait is allowed."""

        async def kill() -> None:
            with suppress(SandboxError):
                await self.kill(process)
            self.forget(process)

        self._machine.do(kill())

    def forget(self, process: DockerProcess) -> None:
        """Let go of a command's streams; what it left running runs on."""
        self._running.discard(process)
        process.close()

    async def _launch(
        self, words: Sequence[str], request: Mapping[str, Any], *, as_root: bool
    ) -> DockerProcess:
        token, mark = new_token(), self._marks.next()
        command = ["/bin/sh", "-c", scripts.COMMAND, "swerl", token, str(mark), *words]
        stream, number = await self._machine.open_exec({"cmd": command, **request})
        order = partial(self._order, mark, as_root)
        ask, cut = partial(self._find_end, number), partial(self._explain_end, number)
        process = DockerProcess(stream, token.encode(), order=order, ask=ask, cut=cut)
        self._running.add(process)
        if self._machine.lost.done():
            process.lose(self._machine.lost.result())
        await asyncio.wait([process.begun], timeout=_BEGIN_TIMEOUT_S)
        if not process.begun.done():  # an agent may stop whatever begins
            await self._machine.close("a command did not begin")
            self._machine.require_alive()
        return process

    async def _undo(self, starting: asyncio.Task[DockerProcess]) -> None:
        with suppress(SandboxError):
            self.kill_soon(await starting)

    async def _order(self, mark: int, as_root: bool, signal: str) -> None:
        self._machine.require_alive()
        try:
            keeper = self._machine.keeper
            if as_root and not self.user_is_root:
                keeper = await self._keep_as_root()
            await keeper.obey(self._marks.order(signal, mark))
        except ConnectionError as error:
            await self._machine.require_alive_soon()
            await self._machine.close("its keeper is gone")
            raise self._machine.lost.result() from error

    async def _keep_as_root(self) -> Keeper:
        """Return the keeper of root's commands: no other user may signal them."""
        if self._root_keeper is None:
            command = ["/bin/sh", "-c", scripts.KEEPER, "swerl-keeper", self._machine.plan.workdir]
            request = {"cmd": command, "user": "root", "stdin": True, "stderr": False}
            stream, _ = await self._machine.open_exec(request)
            self._root_keeper = Keeper(stream, self._drop_root_keeper)
        return self._root_keeper

    def _drop_root_keeper(self) -> None:
        self._root_keeper = None

    async def _find_end(self, number: str) -> int:
        """Wait until the daemon says that a command has ended, and return its exit code.

        What its streams say is not enough: the command itself may have said it.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                told = await self._machine.api.call(lambda client: client.exec_inspect(number))
            except SandboxError:
                await self._machine.require_alive_soon()
                raise
            if not told["Running"] and told["ExitCode"] is not None:
                return int(told["ExitCode"])
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _explain_end(self, number: str, said: bytes) -> int:
        """Return the exit code of a command whose stream broke off. Raises SandboxLostError
        where the command goes on without it."""
        await self._machine.require_alive_soon(_LOSS_TIMEOUT_S)
        if said.startswith(b"OCI runtime exec failed"):
            raise await self._machine.refusal(said.decode("utf-8", "replace"))
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                return await self._find_end(number)
        except TimeoutError:
            await self._machine.close("the stream of a command broke")
            raise self._machine.lost.result() from None

    def _lose(self, lost: asyncio.Future[SandboxLostError]) -> None:
        for process in list(self._running):
            process.lose(lost.result())
            self.forget(process)
        if self._root_keeper:
            self._machine.do(self._root_keeper.close())
