"""The controller's side of a supervisor: its socket, and the commands started through it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from swerl.core.chat import Json
from swerl.core.errors import SandboxError, SandboxLostError
from swerl.core.sandbox import CappedOutput, Chunk, closed_input
from swerl.sandboxes._local import wire
from swerl.sandboxes._local.limits import MemoryCounts
from swerl.sandboxes._local.output import Output
from swerl.sandboxes._local.wire import Command, Packet

_PAUSE_S = 0.01
"""Pause after output beyond the cap, so that endless output costs the controller little."""

ANSWER_S = 20.0
"""Seconds for a supervisor to answer; it does so at once, or after the 5 s of a hard kill."""
BOOT_S = 120.0
"""Seconds for a sandbox to start; milliseconds on a free machine."""
CLOSE_S = 30.0
"""Seconds for a supervisor to end its sandbox; then it is killed."""
_GRACE_S = 30.0
"""Seconds beyond a sandbox's lifetime in which its supervisor has to report its end."""

_VERDICT_S = 5.0
"""Seconds for the spawner to tell whose fault the end of a sandbox was."""
_REASON_CHARS = 200

MakeRequest = Callable[[int], Command | Mapping[str, Json]]
"""Builds the message of a request from the request's number."""


async def launch(
    link: Link, request: MakeRequest, given: bytes | None = None
) -> LocalSandboxProcess:
    """Start a command. `given` is its whole standard input; None leaves the input open."""
    output = Output()
    try:
        # Whole input is a file in memory, so no task has to feed a pipe.
        source, stdin = _open_pipe() if given is None else (_open_file(given), -1)
        try:
            number, answer = await link.request(request, (source, *output.inside), "exit_code")
        except BaseException:
            if stdin >= 0:
                os.close(stdin)
            raise
        finally:
            # The supervisor has a copy of its own.
            os.close(source)
        output.close_inside()
    except BaseException:
        output.close()
        raise
    return LocalSandboxProcess(link, number, answer, output, stdin)


class LocalSandboxProcess:
    """A running command of a `local` sandbox."""

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
        """Yield its output until it has ended. For one reader.

        Unread output stays in a pipe of 64 KiB; the command blocks while the pipe is full.
        """
        while chunk := await self._output.next():
            yield chunk

    async def send(self, data: bytes) -> None:
        async with self._sending:
            view = memoryview(data)
            while view:
                if self._stdin < 0:
                    raise closed_input()
                try:
                    view = view[os.write(self._stdin, view) :]
                except BlockingIOError:
                    await _writable(self._stdin)
                except BrokenPipeError as error:
                    raise closed_input() from error

    async def end_input(self) -> None:
        """Close its standard input after the data that is being sent."""
        async with self._sending:
            self._close_input()

    async def signal(self, number: int) -> None:
        if number not in range(1, signal.NSIG):
            raise SandboxError(
                f"there is no signal {number}", hint=f"signals are 1 to {signal.NSIG - 1}"
            )
        if not self._answer.done():
            await self._link.send({"signal": number, "command": self._number})

    async def wait(self) -> int:
        # A cancelled wait must not cancel the answer itself.
        code = (await asyncio.shield(self._answer)).body["exit_code"]
        assert isinstance(code, int)
        return code

    async def collect(self, kept: CappedOutput) -> None:
        """Read its output to the end into `kept`; safe to cancel and to call again."""
        while chunk := await self._output.next():
            if not kept.add(chunk):
                await asyncio.sleep(_PAUSE_S)

    async def kill(self) -> None:
        """Kill it and all processes that it started, and wait until they are dead."""
        _, killed = await self._link.request(lambda n: {"number": n, "kill": self._number})
        await self._link.answered(killed)
        await asyncio.wait([self._answer])

    def kill_now(self) -> None:
        """Request that it be killed, without waiting."""
        self._link.send_now({"number": 0, "kill": self._number})

    def close(self) -> None:
        """Close its streams; processes that it left behind keep running."""
        self._close_input()
        self._output.close()

    def _close_input(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


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


class Link:
    """The controller's end of one supervisor's socket: pairs answers with requests."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        lifetime_s: float,
        remove: Callable[[], bool],
        verdict: int = -1,
    ) -> None:
        """`verdict` is the pipe in which the spawner tells whose fault the sandbox's end was.

        `remove` kills the supervisor and returns whether nothing is left; it may block.
        """
        self._sock = sock
        self._verdict = verdict
        self._name = name
        self._remove = remove
        self._loop = asyncio.get_running_loop()
        # The supervisor ends the sandbox after its lifetime, unless it is stopped itself.
        self._late = self._loop.call_later(lifetime_s + _GRACE_S, self._give_up)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[Packet], str]] = {}
        """Number of a request -> its answer, and the name of the whole number in it."""
        self.memory_counts: Callable[[], MemoryCounts] = MemoryCounts
        """Reads the counters of the sandbox's memory group."""
        self._reason = "its supervisor was killed"
        self._from_inside = False
        self._is_hung_up = False
        self.is_given_up = False
        """True once the supervisor did not answer in time."""
        self.first: asyncio.Future[Packet] = self._loop.create_future()
        """The supervisor's first message: the sandbox is ready, or it cannot start."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)

    async def request(
        self, make: MakeRequest, fds: Sequence[int] = (), result: str = "number"
    ) -> tuple[int, asyncio.Future[Packet]]:
        """Send a request; return its number and the future of its answer.

        The answer is an object with a whole number of the name `result`.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Packet] = self._loop.create_future()
        # Registered before the message is sent, because the answer may come at once.
        self._waiting[number] = answer, result
        await self.send(make(number), fds)
        return number, answer

    async def answered(self, answer: asyncio.Future[Packet]) -> Packet:
        """Return an answer that comes at once. Raises SandboxLostError if it does not."""
        within_s = BOOT_S if answer is self.first else ANSWER_S
        done, _ = await asyncio.wait([answer], timeout=within_s)
        if not done:
            self._give_up()
            raise self._lost()
        return answer.result()

    async def send(self, body: Command | Mapping[str, Json], fds: Sequence[int] = ()) -> None:
        """Send a message. Raises SandboxLostError if the sandbox is gone."""
        until_s = self._loop.time() + ANSWER_S
        while True:
            if self._loop.time() > until_s:
                self._give_up()
            self.require_alive()
            try:
                wire.send(self._sock, body, fds)
            except BlockingIOError:
                await asyncio.sleep(0.001)  # the supervisor is busy and its queue is full
            except OSError as error:
                await asyncio.wait([self.ended], timeout=2 * _VERDICT_S)
                raise self._lost() from error
            else:
                return

    def send_now(self, body: Mapping[str, Json]) -> None:
        """Send a message without waiting; if that fails, close the sandbox."""
        try:
            wire.send(self._sock, body)
        except OSError:
            self.hang_up()

    def require_alive(self) -> None:
        if self.ended.done():
            raise self._lost()

    async def close(self) -> None:
        """Have the supervisor end the sandbox, and wait until it has; if it does not, kill it.

        Raises SandboxLostError if something of the sandbox is left even then.
        """
        self.hang_up()
        await asyncio.wait([self.ended], timeout=CLOSE_S)
        if not self.ended.done():
            self._give_up()
        if self.is_given_up and not await asyncio.to_thread(self._remove):
            raise self._lost()

    def hang_up(self, reason: str = "it is closed") -> None:
        """Have the supervisor end the sandbox."""
        if not self.ended.done() and not self._is_hung_up:
            self._reason, self._is_hung_up = reason, True
            try:
                # Only the writing half closes, so the supervisor's last message can still arrive.
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._end()

    def _give_up(self) -> None:
        """Count the sandbox as lost, because its supervisor is stopped; `close` then kills it."""
        if not self.ended.done():
            self._reason, self._from_inside = "its supervisor does not answer", False
            self.is_given_up = True
            self._end()

    def drop_unread(self) -> None:
        """Close the descriptors of a first message that was never read."""
        if self.first.done() and not self.first.cancelled() and not self.first.exception():
            _close_fds(self.first.result())

    def _receive(self) -> None:
        try:
            packet = wire.receive(self._sock)
        except BlockingIOError:
            return
        except ValueError:
            self._give_up()
            return
        if packet is None:
            self._await_verdict()
        elif "lost" in packet.body:
            self._reason = str(packet.body["lost"])[:_REASON_CHARS]
            _close_fds(packet)
        elif "number" in packet.body:
            self._answer(packet)
        elif not self.first.done():
            self.first.set_result(packet)
        else:
            _close_fds(packet)

    def _await_verdict(self) -> None:
        """End once the spawner has told whose fault it was."""
        self._loop.remove_reader(self._sock)
        if self._is_hung_up or self._verdict < 0:
            self._end()
        else:
            self._loop.add_reader(self._verdict, self._judge)
            self._late.cancel()
            self._late = self._loop.call_later(_VERDICT_S, self._end)

    def _judge(self) -> None:
        self._from_inside = os.read(self._verdict, 1) == wire.FROM_INSIDE
        if self._from_inside:
            self._reason = "its processes used up its memory_mib"
        self._end()

    def _answer(self, packet: Packet) -> None:
        number = packet.body["number"]
        number = number if type(number) is int else 0
        waiting, result = self._waiting.pop(number, (None, ""))
        if waiting is None or waiting.done():
            # No caller takes these descriptors, so they would leak.
            _close_fds(packet)
        elif "refused" in packet.body:
            message = f"sandbox {self._name} cannot start a command: {packet.body['refused']}"
            hint = "its processes use up its limits; raise num_processes or memory_mib"
            waiting.set_exception(SandboxError(message, hint=hint, from_inside=True))
            waiting.exception()  # the caller may not wait for it
        elif type(packet.body.get(result)) is not int:
            _close_fds(packet)
            self._waiting[number] = waiting, result
            self._give_up()
        elif result == "exit_code" and self._others_took_the_memory():
            # A test that the kernel killed for others' memory has no result.
            self._waiting[number] = waiting, result
            self.hang_up("the machine ran out of memory")
        else:
            waiting.set_result(packet)

    def _others_took_the_memory(self) -> bool:
        """Return whether processes inside were killed though the group was below its limit."""
        counts = self.memory_counts()
        return counts.kills > 0 and counts.hits == 0

    def _end(self) -> None:
        self._late.cancel()
        if self.ended.done():
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._verdict >= 0:
            self._loop.remove_reader(self._verdict)
            os.close(self._verdict)
        self.ended.set_result(None)
        for future in (self.first, *(waiting for waiting, _ in self._waiting.values())):
            if not future.done():
                future.set_exception(self._lost())
                future.exception()  # the caller may not wait for it
        self._waiting.clear()

    def _lost(self) -> SandboxLostError:
        hint = "open a new sandbox; `dmesg` shows whether the kernel ran out of memory"
        message = f"sandbox {self._name} is gone: {self._reason}"
        return SandboxLostError(message, hint=hint, from_inside=self._from_inside)


def _close_fds(packet: Packet) -> None:
    for fd in packet.fds:
        os.close(fd)
    packet.fds.clear()
