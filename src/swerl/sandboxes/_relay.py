"""The way back for a sandbox without a network: connections carried by the backend's exec stream.

A small server inside listens on the sandbox's loopback. A courier, started with `Sandbox.start`,
carries its connections over stdin and stdout to the controller, which joins each to one listener
and to nothing else. When the stream breaks, another courier goes on where it stopped. When the
server is killed it is started again, a few times; then the sandbox counts as lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files

from swerl.core.contracts import Listener, Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.sandboxes._relay_streams import Door, Streams
from swerl.sandboxes._relay_wire import Wire

_NO_PROGRAM = 96
_NO_SERVER = 3
_BEGIN = f"""
python=$1; perl=$2; shift 2; cd /
if command -v python3 >/dev/null 2>&1; then exec python3 -I -S -c "$python" "$@"; fi
if command -v perl >/dev/null 2>&1; then exec perl -e "$perl" -- "$@"; fi
exit {_NO_PROGRAM}
"""
_SERVE_TIMEOUT_S = 30.0
_PING_S = 15.0
_SILENCE_S = 45.0
"""A link that says nothing for so long, though asked, is cut and made again."""
_GIVE_UP_S = 90.0
"""Seconds without any link after which the sandbox counts as lost."""
_PAUSES_S = (0.05, 0.2, 1.0, 3.0)
"""Pauses between attempts at a link; the last repeats."""
_MAX_RESTARTS = 5


@asynccontextmanager
async def open_relay(
    sandbox: Sandbox, listener: Listener, *, on_lost: Callable[[SandboxLostError], None]
) -> AsyncIterator[str]:
    """Make `listener` reachable from inside the sandbox and yield its base URL there.

    `on_lost` is called once when the way back is gone for good. Raises SandboxError where the
    image has neither Python nor Perl.
    """
    relay = _Relay(sandbox, Door())
    keeper = None
    try:
        await relay.serve()
        await relay.door.give_to(listener)
        keeper = asyncio.ensure_future(relay.keep())
        keeper.add_done_callback(lambda task: _tell(task, on_lost))
        yield f"http://127.0.0.1:{relay.port}"
    finally:
        relay.door.close()
        if keeper:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await relay.streams.close()


class _Relay:
    """The controller's half."""

    def __init__(self, sandbox: Sandbox, door: Door) -> None:
        self.door = door
        self.port = 0
        self._sandbox = sandbox
        self._name = f"swerl-relay-{secrets.token_hex(16)}"
        self._wire = Wire()
        self.streams = Streams(door, self._wire.push)
        self._heard_at = 0.0
        self._said = b""
        self._nonsense = 0
        """Links that ended because of what the half inside said."""

    async def serve(self) -> None:
        """Start the server inside, on its old port where it had one."""
        done = await self._sandbox.run(
            _argv("serve", self._name, str(self.port)),
            cwd="/",
            user="root",
            timeout_s=_SERVE_TIMEOUT_S,
        )
        if done.exit_code == _NO_PROGRAM:
            raise SandboxError(
                f"sandbox {self._sandbox.id} has neither python3 nor perl for the relay",
                hint='add one to the image, or set way = "public"',
            )
        try:
            self.port = int(done.stdout)
        except ValueError as error:
            raise SandboxError(
                f"the relay in sandbox {self._sandbox.id} does not start: {done.text[-300:]}",
                hint="it needs a loopback interface inside",
            ) from error

    async def keep(self) -> None:
        """Hold a link to the server. Raises SandboxLostError when there is no way back."""
        loop, failures, restarts = asyncio.get_running_loop(), 0, 0
        self._heard_at = loop.time()
        while True:
            before = self._heard_at
            code = await self._try_link()
            failures = 0 if self._heard_at > before else failures + 1
            if code == _NO_SERVER:
                restarts += 1
                if restarts > _MAX_RESTARTS:
                    raise self._lost("its server was killed again and again", from_inside=True)
                await self._begin_again()
            if loop.time() - self._heard_at > _GIVE_UP_S:
                raise self._lost("no exec stream lasts: ", self._said.decode(errors="replace"))
            if failures:
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])

    async def _begin_again(self) -> None:
        await self.streams.close()
        self._wire.forget()
        try:
            await self.serve()
        except SandboxLostError:
            raise
        except SandboxError as error:
            raise self._lost("its server does not start again: ", str(error)) from error

    async def _try_link(self) -> int | None:
        """Run one courier until its stream ends; return its exit code where it has one."""
        try:
            argv = _argv("carry", self._name)
            async with self._sandbox.start(argv, cwd="/", user="root") as process:
                self._wire.begin_link()
                await self._converse(process)
                return await process.wait()
        except SandboxLostError:
            raise
        except ValueError as error:
            self._nonsense += 1
            if self._nonsense > _MAX_RESTARTS:
                raise self._lost("it talks nonsense: ", str(error)) from error
            return None
        except (SandboxError, TimeoutError) as error:
            self._said = str(error).encode()[-300:]
            return None

    async def _converse(self, process: Process) -> None:
        """Say and hear until the courier says no more, or either direction breaks."""
        heard = asyncio.ensure_future(self._receive(process))
        said = asyncio.ensure_future(self._send(process))
        try:
            done, _ = await asyncio.wait({heard, said}, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                each.result()
        finally:
            heard.cancel()
            said.cancel()
            await asyncio.gather(heard, said, return_exceptions=True)

    async def _receive(self, process: Process) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_SILENCE_S) as timer:
            async for chunk in process.output():
                if chunk.is_stderr:
                    self._said = (self._said + chunk.data)[-300:]
                    continue
                self._heard_at = loop.time()
                timer.reschedule(self._heard_at + _SILENCE_S)
                for frame in self._wire.take(chunk.data):
                    self.streams.obey(frame)

    async def _send(self, process: Process) -> None:
        while True:
            try:
                async with asyncio.timeout(_PING_S):
                    lines = await self._wire.outgoing()
            except TimeoutError:
                self._wire.ping()
            else:
                await process.send(lines)

    def _lost(self, why: str, detail: str = "", *, from_inside: bool = False) -> SandboxLostError:
        message = f"the way back from sandbox {self._sandbox.id} is gone: {why}{detail}"
        hint = "open a fresh sandbox; an agent may have ended it"
        return SandboxLostError(message, hint=hint, from_inside=from_inside)


def _argv(*arguments: str) -> list[str]:
    folder = files("swerl.sandboxes")
    programs = [folder.joinpath(f"_relay_inside.{kind}").read_text() for kind in ("py", "pl")]
    return ["sh", "-c", _BEGIN, "swerl-relay", *programs, *arguments]


def _tell(task: asyncio.Task[None], on_lost: Callable[[SandboxLostError], None]) -> None:
    if task.cancelled():
        return
    error = task.exception()
    if isinstance(error, SandboxLostError):
        on_lost(error)
    elif error:
        message = f"the relay broke: {type(error).__name__}: {error}"
        lost = SandboxLostError(message, hint="open a fresh sandbox")
        lost.__cause__ = error
        on_lost(lost)
