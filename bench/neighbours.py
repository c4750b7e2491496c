"""64 sandboxes and sessions, of which eight misbehave: the speed that the other 56 lose.

    python bench/neighbours.py                   --json FILE keeps the figures
    python bench/neighbours.py --each --num 32   one misbehaving at a time, of each kind
    python bench/neighbours.py --alone           the controller's CPU for each kind, without others
    python bench/neighbours.py --seconds 20 --turns 5 --cpus 0.1
    python bench/neighbours.py --connections 100000 --seconds 300
                                                 one client opens so many, to the main port and to
                                                 its own, within this time each; no sandbox

Each good neighbour runs a short command in its `local` sandbox and then asks the gateway for
a reply, again and again. Those that misbehave do so inside of their sandboxes, and reach the
gateway by their Session's own port, as an agent does. Quiet and loud phases take turns, and each
loud one is compared with the quiet ones around it, because other work on the machine changes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gzip
import json
import os
import resource
import socket
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

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
        self.port = ""
        """Port of its Session inside of its sandbox."""
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


SCRIPTS = {
    "fork bomb": "f() { f | f & }; f; sleep 5",
    "memory": "tail -c 1G /dev/zero",
    "disk": "cat /dev/zero > /tmp/full; rm -f /tmp/full",
    "inodes": "i=0; while :; do i=$((i+1)); : > /tmp/f$i || break; done; rm -f /tmp/f*",
    "output": "yes",
}
TALK = [{"role": ("user", "assistant")[n % 2], "content": "hi"} for n in range(9_999)]
GZIP = "Content-Encoding: gzip\r\n"
FLOODS: dict[str, list[tuple[bytes, str]]] = {
    "messages": [(json.dumps({"model": "m", "messages": TALK}).encode(), "")],
    "bombs": [
        (gzip.compress(b" " * 2**25), GZIP),
        (b'{"model":"m","messages":' + b"[" * 500_000, ""),
        (b'{"model":"' + b"\\n" * 400_000, ""),
    ],
    "connections": [],
}
"""Bodies and headers that `FLOOD` sends; without any it opens connections."""
BAD = (*SCRIPTS, *FLOODS)
FLOOD = """
import socket, sys, threading, time
port, *extra = int(sys.argv[1]), *sys.argv[2:]
bodies = [(open(f"/tmp/{n}", "rb").read(), each) for n, each in enumerate(extra)]

def send():
    while True:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            try:
                for body, extra in bodies * 50:
                    head = f"POST /v1/messages/count_tokens HTTP/1.1\\r\\nHost: a\\r\\n{extra}"
                    sock.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
                    sock.recv(1 << 16)
            except OSError:
                time.sleep(0.01)

def connect():
    held = []
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port), 5)
            sock.send(b"POST /v1/messages HTTP/1.1\\r\\nContent-Length: 999\\r\\nX-Slow: ")
            if len(held) % 2:
                sock.shutdown(socket.SHUT_WR)
            held.append(sock)
        except OSError:
            pass
        if len(held) > 400:
            held.pop(0).close()

for _ in range(4 if bodies else 1):
    threading.Thread(target=send if bodies else connect).start()
"""


OPENER = """
import collections, resource, select, socket, sys, time
port, most, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held, pending, tried, opened = collections.deque(), {}, 0, 0
poll, until_s = select.epoll(), time.monotonic() + seconds
while opened < most and time.monotonic() < until_s:
    while len(pending) < 256 and opened + len(pending) < most:
        sock = socket.socket()
        sock.setblocking(False)
        tried += 1
        sock.bind((f"127.0.1.{tried % 200 + 1}", 0))  # one address has ports for 28,000
        sock.connect_ex(("127.0.0.1", port))
        pending[sock.fileno()] = sock
        poll.register(sock, select.EPOLLOUT)
    for fd, _ in poll.poll(1):
        poll.unregister(fd)
        sock = pending.pop(fd)
        try:
            sock.send(b"POST /v1/messages HTTP/1.1\\r\\nContent-Length: 999\\r\\nX-Slow: ")
        except OSError:
            sock.close()
            continue
        opened += 1
        held.append(sock)
        if len(held) > min(5000, hard - 600):
            held.popleft().close()
print(opened, tried)
"""
"""Opens half a request on each connection, holds 5,000 of them, and closes the oldest."""


async def open_many(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Let one client open connections while another Session asks by three ways."""
    engine, found = Engine(), {}
    async with Gateway(engine=engine, family=engine.family) as gateway:
        good, bad = (gateway.open(name, sampling=Sampling(9), limits=FREE) for name in "gb")
        urls = []
        for session in (good, bad):
            sock = socket.create_server(("127.0.0.1", 0))
            urls.append(f"http://127.0.0.1:{sock.getsockname()[1]}")
            await session.attach(sock)
        ways = {"own port": (urls[0], False), "main port": (good.url, False)}
        ways["main port, a connection each"] = good.url, True
        for title, url in (("quiet", ""), ("main port", gateway.url), ("its own port", urls[1])):
            opener = None
            if url:
                words = [url.rpartition(":")[2], str(given.connections), str(given.seconds)]
                command = [sys.executable, "-S", "-c", OPENER, *words]
                pipe = asyncio.subprocess.PIPE
                opener = await asyncio.create_subprocess_exec(*command, stdout=pipe)
            over = asyncio.create_task(opener.communicate() if opener else asyncio.sleep(10))
            began_s, cpu_s = time.monotonic(), time.process_time()
            asked = [asyncio.create_task(ask_until(over, good, *way)) for way in ways.values()]
            times = [sorted(await each) for each in asked]
            seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
            done = await over
            figures = {"opened, tried": done[0].decode().split()} if done else {}
            for name, one in zip(ways, times, strict=True):
                ms = [round(1000 * one[int(part * (len(one) - 1))], 1) for part in (0.5, 0.99, 1)]
                figures[f"{name}: requests; median, 99 %, longest ms"] = [len(one), *ms]
            figures["seconds, CPU seconds"] = [round(seconds, 1), round(cpu_s, 2)]
            figures["resident, peak MiB"] = memory_mib()
            found[title] = figures
            show(title, figures)
    return found


async def ask_until(over: asyncio.Task[Any], one: Any, url: str, alone: bool) -> list[float]:
    """Ask again and again; return the seconds of each answer."""
    times, headers = list[float](), {"Authorization": f"Bearer {one.key}"}
    connector = aiohttp.TCPConnector(force_close=alone)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        while not over.done():
            body = {"model": "m", "messages": [{"role": "user", "content": f"{len(times)}"}]}
            began_s = time.monotonic()
            async with http.post(url + "/v1/messages", json=body) as answer:
                await answer.read()
            if answer.status != 200:
                raise SystemExit(f"a request was lost: {answer.status}")
            times.append(time.monotonic() - began_s)
            await asyncio.sleep(0.05)
    return times


def memory_mib() -> list[float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [round(pages * resource.getpagesize() / 2**20, 1), round(peak, 1)]


async def misbehave(kind: str, one: Neighbour, until_s: float) -> None:
    """Do harm inside of a sandbox until then."""
    script = SCRIPTS.get(kind, "")
    extra = [headers for _, headers in FLOODS.get(kind, ())]
    argv = ["sh", "-c", script] if script else ["python3", "-S", "-c", FLOOD, one.port, *extra]
    while (left_s := until_s - time.monotonic()) > 0:
        await one.sandbox.run(argv, timeout_s=left_s)


async def bring(kind: str, one: Neighbour) -> None:
    """Put the bodies of a flood into its sandbox, so that it begins at once."""
    for number, (body, _) in enumerate(FLOODS.get(kind, ())):
        await one.sandbox.write(f"/tmp/{number}", body)


async def phase(
    good: list[Neighbour], bad: list[tuple[str, Neighbour]], seconds: float
) -> tuple[float, float]:
    """Return rounds a second of the good neighbours, and the controller's CPU in ms for each."""
    for one in good:
        one.num_rounds = 0
    began_s, cpu_s = time.monotonic(), time.process_time()
    until_s = began_s + seconds
    harm = [asyncio.create_task(misbehave(kind, one, until_s)) for kind, one in bad]
    await asyncio.gather(asyncio.sleep(seconds), *(one.work(until_s) for one in good))
    seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    await asyncio.gather(*harm, return_exceptions=True)
    rounds = sum(one.num_rounds for one in good)
    return rounds / seconds, 1000 * cpu_s / max(rounds, 1)


async def compare(
    good: list[Neighbour], bad: list[tuple[str, Neighbour]], given: argparse.Namespace
) -> dict[str, Any]:
    """Let quiet and loud phases take turns; return medians."""
    await asyncio.gather(*(bring(kind, one) for kind, one in bad))
    quiet, loud = [await phase(good, [], given.seconds)], []
    for _ in range(given.turns):
        loud.append(await phase(good, bad, given.seconds))
        quiet.append(await phase(good, [], given.seconds))
    pairs = zip(loud, quiet[:-1], quiet[1:], strict=True)
    lost = [100 * (1 - 2 * during[0] / (was[0] + then[0])) for during, was, then in pairs]
    median = statistics.median
    # At the quiet cost of a round, the rest of the controller's CPU went to those that misbehave.
    each_ms = median(cpu for _, cpu in quiet)
    flood_ms = median(rate * (cpu - each_ms) for rate, cpu in loud)
    failures = [text for one in good for text in one.failures]
    return {
        "rounds/s quiet": round(median(rate for rate, _ in quiet), 1),
        "rounds/s loud": round(median(rate for rate, _ in loud), 1),
        "lost, %": round(median(lost), 1),
        "lost in each turn, %": [round(one) for one in lost],
        "controller's CPU a round, quiet, ms": round(median(cpu for _, cpu in quiet), 2),
        "controller's CPU a round, loud, ms": round(median(cpu for _, cpu in loud), 2),
        "controller's CPU for the loud, % of a core": round(flood_ms / 10, 1),
        "failed rounds": len(failures),
        "first failures": failures[:3],
        "load average": round(os.getloadavg()[0], 1),
    }


async def measure(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    engine, backend = Engine(), local.build(local.Options())
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway(engine=engine, family=engine.family))
        ones = []
        for number in range(given.num):
            limits = dataclasses.replace(LIMITS, num_cpus=given.cpus)
            opened = backend.open("host", limits, workdir="/testbed")
            session = gateway.open(str(number), sampling=Sampling(9), limits=FREE)
            ones.append(Neighbour(await stack.enter_async_context(opened), session))
        for one in ones[: given.bad]:
            one.port = (await one.sandbox.expose(one.session)).rpartition(":")[2]
        print("limits in force:", *sorted(ones[0].sandbox.limits))
        good, found = ones[given.bad :], {}
        if given.alone:
            for kind, one in zip(given.kinds or BAD, ones, strict=False):
                await bring(kind, one)
                _, cpu_ms = await phase([], [(kind, one)], given.seconds)
                found[kind] = {"controller's CPU, ms a second": round(cpu_ms / given.seconds, 1)}
                show(kind, found[kind])
            return found
        if given.each:
            for kind in given.kinds or BAD:
                found[kind] = await compare(good, [(kind, ones[0])], given)
                show(kind, found[kind])
            return found
        names = [*(given.kinds or BAD)] * given.bad
        bad = list(zip(names, ones[: given.bad], strict=False))
        title = f"{len(bad)} of {len(ones)} misbehave"
        found[title] = await compare(good, bad, given)
        show(title, found[title])
    return found


def show(title: str, figures: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, value in figures.items():
        print(f"  {name:42} {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one phase")
    parser.add_argument("--turns", type=int, default=3, help="loud phases")
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--bad", type=int, default=8)
    parser.add_argument("--each", action="store_true", help="one kind at a time")
    parser.add_argument("--alone", action="store_true", help="one kind, and no good neighbours")
    parser.add_argument("--kinds", nargs="*", choices=BAD, help="these alone")
    parser.add_argument("--connections", type=int, help="of one client, and nothing else")
    parser.add_argument("--cpus", type=float, default=1.0, help="CPUs of each sandbox")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = asyncio.run(open_many(given) if given.connections else measure(given))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
