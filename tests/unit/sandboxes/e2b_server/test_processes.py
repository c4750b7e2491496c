"""A command's output reaches whoever listens, and waits for whoever comes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from swerl.core.sandbox import FROM_INSIDE, Chunk
from swerl.sandboxes.e2b_server.failure import WireError
from swerl.sandboxes.e2b_server.processes import (
    BACKLOG_BYTES,
    CommandEnd,
    CommandSpec,
    Processes,
    RunningCommand,
)


async def _nothing() -> AsyncIterator[Chunk]:
    return
    yield


def running() -> RunningCommand:
    return RunningCommand(7, CommandSpec(["true"], "/"), None, _nothing())  # type: ignore[arg-type]


async def test_what_nobody_hears_is_kept_up_to_the_cap_the_newest_of_it() -> None:
    command = running()
    piece = b"x" * (1 << 20)
    for _ in range(2 * BACKLOG_BYTES // len(piece)):
        await command.hand_out(Chunk(piece))
    await command.hand_out(Chunk(b"last"))
    command.finish(CommandEnd(0))
    with command.listen() as listener:
        heard = [await listener.next()]
        while not isinstance(heard[-1], CommandEnd):
            heard.append(await listener.next())
    sizes = [len(event.data) for event in heard if isinstance(event, Chunk)]
    assert sum(sizes) <= BACKLOG_BYTES
    assert heard[-2] == Chunk(b"last")


async def test_two_listeners_both_hear_what_comes() -> None:
    command = running()
    with command.listen() as one, command.listen() as two:
        await command.hand_out(Chunk(b"both"))
        assert await one.next() == await two.next() == Chunk(b"both")


async def test_a_listener_that_leaves_gives_back_what_it_did_not_take() -> None:
    command = running()
    with command.listen():
        await command.hand_out(Chunk(b"untaken"))
    with command.listen() as next_one:
        assert await next_one.next() == Chunk(b"untaken")


async def test_a_listener_that_leaves_frees_the_command_that_waits_for_it() -> None:
    command = running()

    async def print_much() -> None:
        for _ in range(200):
            await command.hand_out(Chunk(b"x"))

    with command.listen():
        printing = asyncio.create_task(print_much())
        await asyncio.sleep(0.01)
        assert not printing.done()
    async with asyncio.timeout(5):
        await printing


async def test_who_comes_after_the_end_hears_the_rest_and_the_end() -> None:
    command = running()
    await command.hand_out(Chunk(b"rest"))
    command.finish(CommandEnd(3))
    command.finish(CommandEnd(4))
    with command.listen() as late:
        assert [await late.next(), await late.next()] == [Chunk(b"rest"), CommandEnd(3)]


async def test_what_a_command_printed_is_not_kept_once_nobody_can_ask_for_it() -> None:
    command = running()
    with command.listen():
        await command.hand_out(Chunk(b"untaken"))
    with command.listen():
        pass
    command.finish(CommandEnd(0))
    with command.listen() as late:
        assert await late.next() == CommandEnd(0)


class Ending:
    """A sandbox, and a command in it that ends before it has printed its pid."""

    def __init__(self) -> None:
        self.began, self.over = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def start(self, *_: object, **__: object) -> AsyncIterator[Ending]:
        yield self

    async def end_input(self) -> None: ...

    async def output(self) -> AsyncIterator[Chunk]:
        self.began.set()
        await self.over.wait()
        return
        yield


@pytest.mark.parametrize("is_removed", [True, False])
async def test_a_command_that_starts_as_its_sandbox_is_removed_is_not_broken_from_inside(
    is_removed: bool,
) -> None:
    sandbox = Ending()
    processes = Processes(sandbox, "/", {}, lambda _: None)  # type: ignore[arg-type]
    processes._can_run = True  # an earlier command ran
    starting = asyncio.create_task(processes.start(CommandSpec(["true"], "/")))
    await sandbox.began.wait()
    if is_removed:
        processes.stop(from_inside=False)
    sandbox.over.set()
    with pytest.raises(WireError) as error:
        await starting
    await processes.close()

    assert (FROM_INSIDE in str(error.value)) is not is_removed
