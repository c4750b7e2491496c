"""Conformance of every sandbox backend: running commands, and listeners exposed to them."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from swerl.core.contracts import Process, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError

from .helpers import GREETED, Echo, Target, processes, sh, until


async def read_all(process: Process) -> tuple[bytes, bytes]:
    """Return everything that a command prints, by stream."""
    texts = {False: b"", True: b""}
    async with asyncio.timeout(20):
        async for chunk in process.output():
            texts[chunk.is_stderr] += chunk.data
    return texts[False], texts[True]


async def read_until(process: Process, end: bytes) -> bytes:
    """Return what a command prints, up to the first chunk after which it ends so."""
    text = b""
    async with asyncio.timeout(20):
        async for chunk in process.output():
            text += chunk.data
            if text.endswith(end):
                break
    return text


async def test_output_comes_while_the_command_runs(sandbox: Sandbox) -> None:
    script = "echo one; read -r word; echo two $word >&2"
    async with sandbox.start(["sh", "-c", script]) as process:
        assert await read_until(process, b"one\n") == b"one\n"
        await process.send(b"go\n")
        assert await read_all(process) == (b"", b"two go\n")
        assert await process.wait() == 0


async def test_the_end_of_input_ends_a_waiting_command(sandbox: Sandbox) -> None:
    async with sandbox.start(["wc", "-c"]) as process:
        await process.send(b"12345")
        await process.end_input()
        assert (await read_all(process))[0].strip() == b"5"
        assert await process.wait() == 0
        with pytest.raises(SandboxError) as raised:
            await process.send(b"more")
        assert raised.value.hint


async def test_input_to_an_ended_command_is_an_error(sandbox: Sandbox) -> None:
    async with sandbox.start(["true"]) as process:
        assert await process.wait() == 0
        with pytest.raises(SandboxError):
            for _ in range(200):
                await process.send(bytes(1 << 16))


async def test_a_signal_reaches_the_whole_tree(sandbox: Sandbox) -> None:
    script = "trap 'echo caught; wait; exit 9' USR1; (trap 'echo child; exit' USR1; echo up; "
    script += "while :; do sleep 0.01; done) & echo up; while :; do sleep 0.01; done"
    async with sandbox.start(["bash", "-c", script]) as process:
        assert await read_until(process, b"up\nup\n") == b"up\nup\n"
        await process.signal(signal.SIGUSR1)
        said, _ = await read_all(process)
        assert await process.wait() == 9
    assert b"caught\n" in said
    assert b"child\n" in said


async def test_leaving_kills_the_command_and_its_children(sandbox: Sandbox) -> None:
    token = f"{time.time():.6f}"
    script = f"setsid sleep 1{token} >/dev/null 2>&1 & exec sleep 2{token}"
    async with sandbox.start(["sh", "-c", script]):
        await until(sandbox, f"sleep 1{token}", 1)
        await until(sandbox, f"sleep 2{token}", 1)
    assert await processes(sandbox, f"sleep 1{token}") == 0
    assert await processes(sandbox, f"sleep 2{token}") == 0


async def test_leaving_kills_processes_that_outlived_the_command(
    target: Target, sandbox: Sandbox
) -> None:
    target.require("end of daemons")
    token = f"{time.time():.6f}"
    async with sandbox.start(["sh", "-c", f"setsid sleep {token} >/dev/null 2>&1 &"]) as process:
        assert await process.wait() == 0
        await until(sandbox, f"sleep {token}", 1)
    assert await processes(sandbox, f"sleep {token}") == 0


async def test_a_slow_reader_loses_nothing(sandbox: Sandbox) -> None:
    script = "import sys\nfor n in range(300): sys.stdout.write(f'{n:010d}' * 1000)"
    said = b""
    async with sandbox.start(["python3", "-c", script]) as process:
        async for chunk in process.output():
            said += chunk.data
            await asyncio.sleep(0.002)
        assert await process.wait() == 0
    assert said == b"".join(b"%010d" % n * 1000 for n in range(300))


async def test_megabytes_pass_unchanged(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * (3 << 12)

    async def feed(process: Process) -> None:
        await process.send(data)
        await process.end_input()

    async with sandbox.start(["cat"]) as process, asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(process))
        assert (await read_all(process))[0] == data


async def test_a_command_in_a_closed_sandbox_is_lost(target: Target) -> None:
    async with target.open() as sandbox:
        assert await sh(sandbox, "echo up") == "up\n"
        context = sandbox.start(["sleep", "60"])
        process = await context.__aenter__()
    with pytest.raises(SandboxLostError):
        await process.wait()
    await context.__aexit__(None, None, None)
    with pytest.raises(SandboxLostError):
        async with sandbox.start(["true"]):
            pass


async def test_listeners_of_two_sandboxes_do_not_mix(target: Target) -> None:
    async with target.open() as one, target.open() as two:
        for sandbox, name in ((one, "one"), (two, "two")):
            listener = Echo(name.encode())
            url = await sandbox.expose(listener)
            assert url.startswith("http://127.0.0.1:")
            done = await sandbox.run(["python3", "-c", GREETED, url], timeout_s=10)
            assert done.stdout.decode() == f"{name}\n", done
            listener.server.close()


async def test_one_sandbox_accepts_several_listeners(sandbox: Sandbox) -> None:
    listeners = [Echo(b"first"), Echo(b"second")]
    urls = [await sandbox.expose(listener) for listener in listeners]
    assert len(set(urls)) == 2
    for url, listener in zip(urls, listeners, strict=True):
        done = await sandbox.run(["python3", "-c", GREETED, url], timeout_s=10)
        assert done.stdout.strip() == listener.name, done
        listener.server.close()


async def test_an_exposed_port_is_not_open_on_the_host(sandbox: Sandbox) -> None:
    listener = Echo(b"inside only")
    url = await sandbox.expose(listener)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    listener.server.close()
