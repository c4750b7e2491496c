"""Targets of attacks on this machine: listeners, another host, a process with a secret."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from swerl.core.secrets import cache_dir, state_dir
from tests.attacks.attack import CannotError

_BESIDE = """
import socket, sys
with socket.create_server(("0.0.0.0", 7)) as server:
    print("up", flush=True)
    while True:
        server.accept()[0].close()
"""
_VICTIM = "import sys, time; open(sys.argv[2]); print('up', flush=True); time.sleep(120)"


class WordServer:
    """Sends its word to every client and counts connections. Implements Listener."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.num_calls = 0
        """Number of connections."""
        self._servers: list[asyncio.Server] = []

    async def attach(self, sock: socket.socket) -> None:
        """Serve a listening socket."""
        sock.setblocking(False)
        start = asyncio.start_unix_server if sock.family == socket.AF_UNIX else asyncio.start_server
        self._servers.append(await start(self._greet, sock=sock))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_calls += 1
        with suppress(ConnectionError):
            writer.write(self.word.encode())
            await writer.drain()
        writer.close()


@asynccontextmanager
async def greeter(*sockets: socket.socket) -> AsyncIterator[WordServer]:
    """Serve a new word at these bound sockets."""
    served = WordServer(new_word())
    try:
        for sock in sockets:
            if sock.type == socket.SOCK_STREAM:
                sock.listen()
                await served.attach(sock)
        yield served
    finally:
        served.close()


@asynccontextmanager
async def neighbour() -> AsyncIterator[str]:
    """Create another host in a network namespace and yield its address.

    It answers at port 7. Raises CannotError if this process may not create one.
    """
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        raise CannotError("creating another host requires root and the program `ip`")
    name = f"swp{secrets.token_hex(4)}"
    network = f"198.18.{secrets.randbelow(256)}"  # a range reserved for benchmarks
    ours, theirs = f"{network}.1", f"{network}.2"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_ip, ip, "netns", "delete", name, check=False)
        await _ip(ip, "netns", "add", name)
        await _ip(ip, *f"link add {name} type veth peer name veth0 netns {name}".split())
        await _ip(ip, *f"addr add {ours}/30 dev {name}".split())
        await _ip(ip, *f"link set {name} up".split())
        await _ip(ip, *f"-n {name} addr add {theirs}/30 dev veth0".split())
        await _ip(ip, *f"-n {name} link set veth0 up".split())
        argv = [ip, "netns", "exec", name, sys.executable, "-I", "-S", "-c", _BESIDE]
        stack.push_async_callback(_end, await _start(*argv))
        yield theirs


@asynccontextmanager
async def victim(word: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a host process with a word in its environment, command line and an open file."""
    with planted([Path(tempfile.gettempdir())], word) as [path]:
        argv = [sys.executable, "-I", "-S", "-c", _VICTIM, word, str(path)]
        process = await _start(*argv, env={"PROBE": word})
        try:
            yield process
        finally:
            await _end(process)


@contextmanager
def planted(folders: list[Path], word: str) -> Iterator[list[Path]]:
    """Write a file with this word into each writable folder; yield the paths."""
    paths = []
    try:
        for folder in folders:
            path = folder / f".swerl-probe-{secrets.token_hex(6)}"
            with suppress(OSError):
                path.write_text(word)
                path.chmod(0o644)
                paths.append(path)
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def private_folders() -> list[Path]:
    """Return writable folders of this machine that a sandbox must not read."""
    home = Path.home()
    named = [home, home / ".ssh", home / ".config", Path("/root"), Path("/root/.ssh"), Path.cwd()]
    named += [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path("/run")]
    named += [state_dir(), cache_dir(), Path("/srv"), Path("/opt"), Path("/mnt")]
    return list(dict.fromkeys(folder for folder in named if os.access(folder, os.W_OK)))


def new_word() -> str:
    """Return a unique word; its prefix contains this process's id."""
    return f"swp{os.getpid():x}x{secrets.token_hex(10)}"


async def _start(*argv: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    """Start a process and wait for its first line of output."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=env
    )
    assert process.stdout
    if not await process.stdout.readline():
        raise CannotError(f"{argv[0]} did not start")
    return process


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _ip(*argv: str, check: bool = True) -> None:
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)
    _, stderr = await process.communicate()
    if check and process.returncode != 0:
        raise CannotError(f"cannot create another host: {stderr.decode().strip()[:200]}")
