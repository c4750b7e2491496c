"""Join a run's Ray cluster while standard input is open: `python -m swerl.cluster.join`.

The first line of standard input holds the head's address and token, and this machine's share; the
answer is the line `joined`. When the input ends, for any reason, Ray and its children are killed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from swerl.cluster.hosts import RAY_SETTINGS, TRIES, has_started, ray_start
from swerl.cluster.node import address_towards
from swerl.engines._process import child


def main() -> None:
    """Read the settings, join, and stay until the input ends."""
    settings = json.loads(sys.stdin.readline())
    address = address_towards(settings["head"].rpartition(":")[0])
    command = ray_start(address, cpus=settings["cpus"], gpus=settings["gpus"])
    command.append(f"--address={settings['head']}")
    env = {**RAY_SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": settings["token"]}
    try:
        code = asyncio.run(_stay(command, env))
    finally:
        clear(Path(settings["folder"]), here=address, head=settings["head"])
    sys.exit(code)


def clear(folder: Path, *, here: str, head: str) -> None:
    """Remove the folder of logs and sockets that Ray makes on every machine.

    The head's own machine is left out: the head still uses the folder there, and removes it.
    """
    if here != head.rpartition(":")[0]:
        shutil.rmtree(folder, ignore_errors=True)


async def _stay(command: list[str], env: Mapping[str, str]) -> int:
    """Be a member until the input ends; return 1 if Ray does not start or ends by itself."""
    gone = asyncio.create_task(_input_end())
    for _ in range(TRIES):
        with tempfile.NamedTemporaryFile(prefix="swerl-join-", suffix=".log") as log:
            has_joined = await _try(command, env, Path(log.name), gone)
            if gone.done():
                return 0
            # The controller reads Ray's messages in this program's standard error.
            sys.stderr.write(Path(log.name).read_text(errors="replace"))
            sys.stderr.flush()
            if has_joined:
                break
    gone.cancel()
    return 1


async def _try(
    command: list[str], env: Mapping[str, str], log: Path, gone: asyncio.Task[None]
) -> bool:
    """Run Ray until it or the input ends; return whether it had joined."""
    async with child(command, log, env=env) as process:
        ended = asyncio.create_task(process.wait())
        up = asyncio.create_task(_up(log))
        await asyncio.wait([gone, ended, up], return_when=asyncio.FIRST_COMPLETED)
        has_joined = up.done()
        up.cancel()
        if has_joined:
            sys.stdout.write("joined\n")
            sys.stdout.flush()
            await asyncio.wait([gone, ended], return_when=asyncio.FIRST_COMPLETED)
        return has_joined


async def _input_end() -> None:
    """Wait for the end of standard input, in a daemon thread that does not delay the exit."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        sys.stdin.read()
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(over.set)

    threading.Thread(target=read, daemon=True).start()
    await over.wait()


async def _up(log: Path) -> None:
    while not has_started(log):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
