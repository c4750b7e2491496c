"""The commands of one container: start them with a mark, signal them, get their exit codes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import ROOT_ENV
from swerl.sandboxes._docker import scripts
from swerl.sandboxes._docker.container import Machine, Marks, Signaller, SignallerReady
from swerl.sandboxes._docker.process import DockerProcess, WaitForExit, new_token

_BEGIN_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 10.0
_LOSS_TIMEOUT_S = 0.5
_END_TIMEOUT_S = 10.0
"""Time after the end of its stream in which the daemon may report a command's end."""
_NUL = ["sh", "-c", "echo 'swerl: an argument contains a null byte' >&2; exit 126"]


class ContainerCommands:
    """Starts commands in a running container."""

    def __init__(self, container: Machine, ready: SignallerReady) -> None:
        self.user_is_root = ready.user_id == 0
        names = (None, ready.user_name, str(ready.user_id))
        self._users = {"root": True, "0": True, **dict.fromkeys(names, self.user_is_root)}
        self._user_env = {"USER": ready.user_name, "LOGNAME": ready.user_name}
        self._container = container
        self._marks = Marks()
        self._running: set[DockerProcess] = set()
        self._root_signaller: Signaller | None = None
        container.lost.add_done_callback(self._lose)

    def is_root(self, user: str | None) -> bool:
        """Return whether this user is root. Raises SandboxError if there is no such user."""
        if user not in self._users:
            raise SandboxError(
                f"no user {user!r} in sandbox {self._container.name}",
                hint="use `root`, or None for the image's own user",
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
        """Start a command. Raises SandboxLostError, or SandboxError at the process limit."""
        words = _NUL if any("\0" in word for word in argv) else list(argv)
        request = {
            "environment": {**(ROOT_ENV if as_root else self._user_env), **(env or {})},
            "user": "root" if as_root and not self.user_is_root else "",
            "stdin": with_input,
        }
        folder = cwd or self._container.workdir
        starting = asyncio.ensure_future(self._launch([folder, *words], request, as_root=as_root))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._container.in_background(self._undo(starting))
            raise

    async def kill(self, process: DockerProcess) -> None:
        """Kill a command; if that fails, close the sandbox.

        Raises SandboxLostError if the sandbox was gone before.
        """
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await process.kill()
        except TimeoutError:
            await self._container.close("a command did not die when it was killed")

    def kill_soon(self, process: DockerProcess) -> None:
        """Kill a command and close its streams, without waiting."""

        async def kill() -> None:
            with suppress(SandboxError):
                await self.kill(process)
            self.forget(process)

        self._container.in_background(kill())

    def forget(self, process: DockerProcess) -> None:
        """Close a command's streams; processes that it left behind keep running."""
        self._running.discard(process)
        process.close()

    async def _launch(
        self, words: Sequence[str], request: Mapping[str, Any], *, as_root: bool
    ) -> DockerProcess:
        token, mark = new_token(), self._marks.next()
        command = ["/bin/sh", "-c", scripts.COMMAND, "swerl", token, str(mark), *words]
        stream, wait_for_exit = await self._container.open_exec({"cmd": command, **request})
        process = DockerProcess(
            stream,
            token.encode(),
            send_signal=partial(self._send_signal, mark, as_root),
            wait_for_exit=wait_for_exit,
            explain_cut=partial(self._explain_cut, wait_for_exit),
        )
        self._running.add(process)
        if self._container.lost.done():
            process.lose(self._container.lost.result())
        await asyncio.wait([process.begun], timeout=_BEGIN_TIMEOUT_S)
        if not process.begun.done():  # an agent may stop every new process
            await self._container.close("a command did not start")
            self._container.require_alive()
        return process

    async def _undo(self, starting: asyncio.Task[DockerProcess]) -> None:
        with suppress(SandboxError):
            self.kill_soon(await starting)

    async def _send_signal(self, mark: int, as_root: bool, signal: str) -> None:
        self._container.require_alive()
        try:
            signaller = self._container.signaller
            assert signaller
            if as_root and not self.user_is_root:
                signaller = await self._signaller_of_root()
            await signaller.send(self._marks.request(signal, mark))
        except ConnectionError as error:
            await self._container.require_alive_soon()
            await self._container.close("its signaller is gone")
            raise self._container.lost.result() from error

    async def _signaller_of_root(self) -> Signaller:
        """Return the signaller of root's commands: no other user may signal them."""
        if self._root_signaller is None:
            workdir = self._container.workdir
            command = ["/bin/sh", "-c", scripts.SIGNALLER, "swerl-signaller", workdir]
            request = {"cmd": command, "user": "root", "stdin": True, "stderr": False}
            stream, _ = await self._container.open_exec(request)
            self._root_signaller = Signaller(stream, self._drop_root_signaller)
        return self._root_signaller

    def _drop_root_signaller(self) -> None:
        self._root_signaller = None

    async def _explain_cut(self, wait_for_exit: WaitForExit, detail: bytes) -> int:
        """Return the exit code of a command whose stream broke. Raises SandboxLostError if the
        command keeps running."""
        await self._container.require_alive_soon(_LOSS_TIMEOUT_S)
        if detail.startswith(b"OCI runtime exec failed"):
            raise await self._container.refusal(detail.decode("utf-8", "replace"))
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                code = await wait_for_exit(None)
                # The end of its machine kills a command, too.
                await self._container.require_running()
                return code
        except TimeoutError:
            await self._container.close("the stream of a command broke")
            raise self._container.lost.result() from None

    def _lose(self, lost: asyncio.Future[SandboxLostError]) -> None:
        for process in list(self._running):
            process.lose(lost.result())
            self.forget(process)
        if self._root_signaller:
            self._container.in_background(self._root_signaller.close())
