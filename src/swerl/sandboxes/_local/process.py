"""A command under way in a sandbox of the `local` backend, as the controller sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

from swerl.core.errors import SandboxError
from swerl.core.sandbox import Chunk
from swerl.sandboxes._kept import Kept
from swerl.sandboxes._local.link import Link, Request
from swerl.sandboxes._local.output import Output
from swerl.sandboxes._local.wire import Packet

_PAUSE_S = 0.005
"""Pause between reads of what is dropped, so that endless output costs the controller little."""


class LocalProcess:
    """A command; `launch` makes one and `close` lets go of it."""

    def __init__(
        self, link: Link, number: int, answer: asyncio.Future[Packet], output: Output, stdin: int
    ) -> None:
        self._link = link
        self._number = number
        self._answer = answer
        self._output = output
        self._stdin = stdin
        self._sending = asyncio.Lock()
        answer.add_done_callback(lambda _: output.end())

    async def output(self) -> AsyncIterator[Chunk]:
        """Yield what it prints, as it comes, until it has ended. For one reader.

        What nobody reads waits in a pipe of 64 KiB, and then the command waits too.
        """
        while chunk := await self._output.next():
            yield chunk

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises SandboxError when that is closed."""
        async with self._sending:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self._require_input(), view) :]
                except BlockingIOError:
                    await _writable(self._stdin)
                except BrokenPipeError as error:
                    raise _closed_input() from error

    async def end_input(self) -> None:
        """Close its standard input, after what is being sent."""
        async with self._sending:
            self._drop_input()

    async def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it started; nothing once it has ended."""
        if number not in range(1, signal.NSIG):
            raise SandboxError(
                f"there is no signal {number}", hint=f"signals are 1 to {signal.NSIG - 1}"
            )
        if not self._answer.done():
            await self._link.tell({"signal": number, "command": self._number})

    async def wait(self) -> int:
        """Return its exit code, 128 + n after signal n. Raises SandboxLostError."""
        code = (await asyncio.shield(self._answer)).body["exit_code"]
        assert isinstance(code, int)
        return code

    async def collect(self, kept: Kept) -> None:
        """Read its output to the end into `kept`; safe to cancel and to call again."""
        while chunk := await self._output.next():
            if not kept.add(chunk):
                await asyncio.sleep(_PAUSE_S)

    async def kill(self) -> None:
        """Kill it and everything that it started, and wait until they are dead."""
        _, killed = await self._link.ask(lambda number: {"number": number, "kill": self._number})
        await asyncio.wait([killed, self._answer])

    def kill_now(self) -> None:
        """Order that it be killed, where no wait is allowed."""
        self._link.tell_now({"number": 0, "kill": self._number})

    def close(self) -> None:
        """Let go of its streams; what it left running runs on."""
        self._drop_input()
        self._output.close()

    def _require_input(self) -> int:
        if self._stdin < 0:
            raise _closed_input()
        return self._stdin

    def _drop_input(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


async def launch(link: Link, request: Request, given: bytes | None = None) -> LocalProcess:
    """Start a command. With `given` that is its whole input; without, its input stays open."""
    output = Output()
    try:
        source, stdin = _open_pipe() if given is None else (_open_file(given), -1)
        try:
            number, answer = await link.ask(request, (source, *output.inside))
        except BaseException:
            if stdin >= 0:
                os.close(stdin)
            raise
        finally:
            os.close(source)
        output.started()
    except BaseException:
        output.close()
        raise
    return LocalProcess(link, number, answer, output, stdin)


def _open_pipe() -> tuple[int, int]:
    source, stdin = os.pipe()
    os.set_blocking(stdin, False)
    return source, stdin


def _open_file(data: bytes) -> int:
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(fd)


def _closed_input() -> SandboxError:
    message = "the command's standard input is closed"
    return SandboxError(message, hint="it has ended, or it closed its input")
