"""The clients of bench/gateway.py: agents that replay their whole history every turn."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

SERVER = Path(__file__).with_name("_gateway_server.py")
RESULT_CHARS = 1_600
TOOLS = [
    {
        "name": f"Tool{number}",
        "description": "Do one thing to the repository, and say what came of it. " * 20,
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
    }
    for number in range(15)
]
_SOURCE = Path(argparse.__file__).read_text(encoding="utf-8")
_HEAD = orjson.dumps(
    {
        "model": "m",
        "max_tokens": 4096,
        "stream": True,
        "system": "You are a coding agent. " * 400,
        "tools": TOOLS,
    }
)[:-1]
_FIXED_TOKENS = 7_500
"""Approximate tokens of system prompt and tools."""


@dataclass(frozen=True)
class Turn:
    """One turn, measured by its client."""

    prompt_tokens: int
    body_bytes: int
    wall_s: float


class Served:
    """A running process of bench/_gateway_server.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        line = self._line()
        self.url: str = line.get("url", "")
        self.ports: list[int] = line.get("ports", [])
        self.pids: list[int] = line.get("pids", [process.pid])
        self.chars_per_token: float = line.get("chars_per_token", 0.0)

    def ask(self, word: str) -> dict[str, Any]:
        """Send a word and return the answer."""
        assert self._process.stdin
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._line()

    def cpu_s(self) -> list[float]:
        """Return the CPU seconds of each process; the process itself does nothing for it."""
        return [sum(map(_cpu_s, Path(f"/proc/{pid}/task").iterdir())) for pid in self.pids]

    def loop_s(self) -> float:
        """Return the CPU seconds of the first process's first thread, which is the event loop's."""
        return _cpu_s(Path(f"/proc/{self.pids[0]}"))

    def rss_mib(self) -> list[float]:
        """Return the memory of each process."""
        return [_rss_mib(pid) for pid in self.pids]

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout
        line: dict[str, Any] = json.loads(self._process.stdout.readline())
        return line


@contextmanager
def served(*arguments: object, cores: Sequence[int] = ()) -> Iterator[Served]:
    """Run the server with these arguments, pinned to `cores` if given."""
    raise_files()
    command = [sys.executable, str(SERVER), *map(str, arguments)]
    pin = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=pin
    ) as process:
        try:
            yield Served(process)
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait()


def raise_files() -> None:
    """Allow this process and its children as many open files as the machine does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Agent:
    """One session's client."""

    def __init__(
        self, gateway: Served, number: int, first_tokens: int, place: int | None = None
    ) -> None:
        self._url = f"http://127.0.0.1:{gateway.ports[number]}/v1/messages"
        self._place = (number if place is None else place) * 7_919
        first = self._slice(int((first_tokens - _FIXED_TOKENS) * gateway.chars_per_token))
        self._history = [orjson.dumps({"role": "user", "content": first})]

    async def turn(self, http: aiohttp.ClientSession) -> Turn:
        """Send one request, record the reply, answer its call."""
        body = _HEAD + b',"messages":[' + b",".join(self._history) + b"]}"
        began = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with http.post(self._url, data=body, headers=headers) as response:
            events = await response.read()
            if response.status != 200 or b"event: error" in events:
                raise RuntimeError(f"status {response.status}: {events[-200:]!r}")
        wall_s = time.perf_counter() - began
        return Turn(self._note(events), len(body), wall_s)

    def _note(self, events: bytes) -> int:
        """Add the reply and its result to the history; return the prompt's tokens."""
        data = [line[6:] for line in events.splitlines() if line.startswith(b"data: ")]
        read = [orjson.loads(line) for line in data]
        usage = read[0]["message"]["usage"]
        call = next(e["content_block"] for e in read if e["type"] == "content_block_start")
        written = next(e["delta"] for e in read if e["type"] == "content_block_delta")
        call["input"] = orjson.loads(written["partial_json"])
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": self._slice(RESULT_CHARS),
        }
        self._history.append(orjson.dumps({"role": "assistant", "content": [call]}))
        self._history.append(orjson.dumps({"role": "user", "content": [result]}))
        return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"])

    def _slice(self, num_chars: int) -> str:
        whole = _SOURCE * (1 + (num_chars + len(_SOURCE)) // len(_SOURCE))
        start = self._place % len(_SOURCE)
        self._place += num_chars
        return whole[start : start + num_chars]


async def drive(
    agents: Sequence[Agent], num_turns: int, *, at_once: int = 0, period_s: float = 0.0
) -> tuple[list[Turn], list[str]]:
    """Let every agent take its turns and return turns and errors.

    `at_once` bounds the requests under way; 0 sets no bound. Each agent begins a turn every
    `period_s` seconds, spread evenly over the agents, or as soon as the last one is answered.
    """
    turns: list[Turn] = []
    errors: list[str] = []
    gate = asyncio.Semaphore(at_once or len(agents))
    began = time.perf_counter()

    async def work(number: int, agent: Agent) -> None:
        for turn in range(num_turns):
            due = began + period_s * (turn + number / len(agents))
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            async with gate:
                try:
                    turns.append(await agent.turn(http))
                except (aiohttp.ClientError, RuntimeError, OSError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    return

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=600)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await asyncio.gather(*(work(number, agent) for number, agent in enumerate(agents)))
    return turns, errors


def _cpu_s(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[0]) / 1e9


def _rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
