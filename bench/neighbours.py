"""64 sandboxes and sessions, of which eight misbehave: what the other 56 lose.

    python bench/neighbours.py                 a table; --json FILE keeps the figures
    python bench/neighbours.py --seconds 60 --num 64 --bad 8

Each good neighbour runs a short command in its `local` sandbox and then asks the gateway for
a reply, again and again. First without the bad ones, then with them, then without them again: the
loss is measured against the mean of both quiet parts, because other work on the machine changes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from swerl.core.chat import Finish, Message, Role
from swerl.core.sandbox import Limits
from swerl.core.turn import Completion, Sampling
from swerl.engines.families import tiny
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway
from swerl.sandboxes import local

LIMITS = Limits(memory_mib=128, num_processes=64, disk_mib=64, lifetime_s=3600)
FREE = SessionLimits(max_turns=10**6, requests_per_minute=10**6, max_sampled_tokens=10**9)


class Engine:
    """Answers at once with the same reply."""

    def __init__(self) -> None:
        self.family = tiny.build(None)
        self._ids = tuple(self.family.encode_reply(Message(Role.ASSISTANT, "Done.")))

    async def generate(self, ids: Any, sampling: Any, session: str) -> Completion:
        return Completion(self._ids, (-1.0,) * len(self._ids), Finish.STOP, "v1", len(ids))

    async def abort(self, session: str) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...
    async def load(self, weights: Any) -> str:
        return "v1"


class Neighbour:
    """One sandbox and one Session."""

    def __init__(self, sandbox: Any, session: Any) -> None:
        self.sandbox = sandbox
        self.session = session
        self.num_rounds = 0
        self.failures: list[str] = []

    async def work(self, until_s: float) -> None:
        """Count rounds of a command and a reply."""
        headers = {"Authorization": f"Bearer {self.session.key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            while time.monotonic() < until_s:
                try:
                    done = await self.sandbox.run(["sh", "-c", "echo $((1+1))"], timeout_s=60)
                    text = f"{self.num_rounds}"
                    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
                    async with http.post(self.session.url + "/v1/messages", json=body) as answer:
                        await answer.read()
                    if done.stdout != b"2\n" or answer.status != 200:
                        self.failures.append(f"{done.exit_code} {answer.status}")
                except Exception as error:  # noqa: BLE001  a failure is a figure
                    self.failures.append(f"{type(error).__name__}: {error}")
                self.num_rounds += 1


def in_sandbox(script: str) -> Callable[[Neighbour, float], Awaitable[None]]:
    """Return a misbehaviour that is a shell script."""

    async def misbehave(one: Neighbour, until_s: float) -> None:
        while time.monotonic() < until_s:
            await one.sandbox.run(
                ["sh", "-c", script], timeout_s=max(1, until_s - time.monotonic())
            )

    return misbehave


def in_requests(
    body: Callable[[], tuple[bytes, dict[str, str]]],
) -> Callable[[Neighbour, float], Awaitable[None]]:
    """Return a misbehaviour that sends a request again and again, four at once."""

    async def misbehave(one: Neighbour, until_s: float) -> None:
        data, headers = body()
        headers = {**headers, "Authorization": f"Bearer {one.session.key}"}
        url = one.session.url + "/v1/messages/count_tokens"

        async def send() -> None:
            async with aiohttp.ClientSession(headers=headers) as http:
                while time.monotonic() < until_s:
                    async with http.post(url, data=data) as answer:
                        await answer.read()

        await asyncio.gather(*(send() for _ in range(4)))

    return misbehave


async def connections(one: Neighbour, until_s: float) -> None:
    """Open connections, send half a request on each, and half-close some."""
    host, _, port = one.session.url.removeprefix("http://").partition(":")
    open_ones: list[asyncio.StreamWriter] = []
    while time.monotonic() < until_s:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/messages HTTP/1.1\r\nContent-Length: 999\r\nX-Slow: ")
            if len(open_ones) % 2:
                writer.write_eof()
            open_ones.append(writer)
            if len(open_ones) > 400:
                open_ones.pop(0).close()
    for writer in open_ones:
        writer.close()


def many_messages() -> tuple[bytes, dict[str, str]]:
    talk = [{"role": ("user", "assistant")[n % 2], "content": "hi"} for n in range(9_999)]
    return orjson.dumps({"model": "m", "messages": talk}), {}


def deep_json() -> tuple[bytes, dict[str, str]]:
    return b'{"model":"m","messages":' + b"[" * 500_000, {}


def zip_bomb() -> tuple[bytes, dict[str, str]]:
    return gzip.compress(b" " * (2**25), mtime=0), {"Content-Encoding": "gzip"}


BAD: dict[str, Callable[[Neighbour, float], Awaitable[None]]] = {
    "fork bomb": in_sandbox("f() { f | f & }; f; sleep 5"),
    "memory": in_sandbox("tail -c 1G /dev/zero"),
    "disk": in_sandbox("cat /dev/zero > /tmp/full; rm -f /tmp/full"),
    "inodes": in_sandbox("i=0; while :; do i=$((i+1)); : > /tmp/f$i || break; done; rm -f /tmp/f*"),
    "output": in_sandbox("yes"),
    "9,999 messages": in_requests(many_messages),
    "bombs of JSON and gzip": in_requests(zip_bomb),
    "half-open connections": connections,
}


REQUESTS = ("9,999 messages", "bombs of JSON and gzip", "half-open connections")
"""They run in processes of their own, so that the gateway pays only for what it does itself."""


async def apart(name: str, one: Neighbour, until_s: float) -> None:
    """Misbehave from another process."""
    facts = json.dumps({"url": one.session.url, "key": one.session.key})
    seconds = str(until_s - time.monotonic())
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--apart", name, facts, seconds, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await child.wait()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def phase(good: list[Neighbour], bad: list[tuple[str, Neighbour]], seconds: float) -> float:
    """Return rounds a second of the good neighbours."""
    for one in good:
        one.num_rounds = 0
    began_s = time.monotonic()
    until_s = began_s + seconds
    harm = [
        asyncio.create_task(
            apart(name, one, until_s) if name in REQUESTS else BAD[name](one, until_s)
        )
        for name, one in bad
    ]
    await asyncio.gather(*(one.work(until_s) for one in good))
    seconds = time.monotonic() - began_s
    for task in harm:
        task.cancel()
    await asyncio.gather(*harm, return_exceptions=True)
    return sum(one.num_rounds for one in good) / seconds


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    engine, backend = Engine(), local.build(local.Options())
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway(engine=engine, family=engine.family))
        ones = []
        for number in range(given.num):
            limits = dataclasses.replace(LIMITS, num_cpus=given.cpus)
            opened = backend.open("host", limits, workdir="/testbed")
            session = gateway.open(str(number), sampling=Sampling(9), limits=FREE)
            ones.append(Neighbour(await stack.enter_async_context(opened), session))
        names = [*BAD] * (given.bad // len(BAD) + 1)
        bad = list(zip(names, ones[: given.bad], strict=False))
        good = ones[given.bad :]
        before = await phase(good, [], given.seconds)
        during = await phase(good, bad, given.seconds)
        after = await phase(good, [], given.seconds)
        failures = [text for one in good for text in one.failures]
    quiet = (before + after) / 2
    return {
        "good neighbours": len(good),
        "bad neighbours": len(bad),
        "limits in force": sorted(ones[0].sandbox.limits),
        "rounds/s before": round(before, 1),
        "rounds/s during": round(during, 1),
        "rounds/s after": round(after, 1),
        "lost, %": round(100 * (1 - during / quiet), 1),
        "failed rounds of good neighbours": len(failures),
        "first failures": failures[:3],
    }


def main() -> None:
    if sys.argv[1:2] == ["--apart"]:
        name, facts, seconds = sys.argv[2:]
        one: Any = SimpleNamespace(session=SimpleNamespace(**json.loads(facts)))
        asyncio.run(BAD[name](one, time.monotonic() + float(seconds)))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--bad", type=int, default=8)
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs of each sandbox")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = asyncio.run(measure(given))
    for name, value in found.items():
        print(f"{name:36} {value}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
