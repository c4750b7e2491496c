"""What one turn costs the gateway: CPU and memory by length of history, with an instant engine.

    python bench/gateway.py [--tokenizer FOLDER] [--json FILE]

An agent's conversation grows by about 500 tokens a turn, in Anthropic Messages with streaming and
15 tools, replayed whole each time as agents do. The gateway runs in a process of its own, whose
CPU time is what counts; the model's tokens come at once. The family is `tiny`, over the tokenizer
in FOLDER (by default Qwen3's, where it lies beside the checkout) or over bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

QWEN3 = Path(__file__).resolve().parents[1] / "../shared/tokenizers/qwen3"
POINTS = (11_000, 48_000, 94_000)
FIRST_PROMPT_TOKENS = 10_900
RESULT_CHARS = 1_400
NEAR = 8
"""Turns around a point whose median is its cost."""
TOOLS = [
    {
        "name": f"Tool{number}",
        "description": "Do one thing to the repository, and say what came of it. " * 20,
        "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
    }
    for number in range(15)
]


@dataclass(frozen=True)
class TurnCost:
    """One turn as measured."""

    prompt_tokens: int
    body_bytes: int
    cpu_ms: float
    wall_ms: float


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokenizer", type=Path, default=QWEN3 if QWEN3.is_dir() else None)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.tokenizer))
        return
    figures = measure(options.tokenizer)
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(tokenizer: Path | None) -> dict[str, Any]:
    """Run one conversation past the last point and return its figures."""
    command = [sys.executable, __file__, "--serve"]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as gateway:
        agent = Agent(gateway)
        start_mib = agent.status()["rss_mib"]
        turns = []
        while not turns or turns[-1].prompt_tokens < POINTS[-1] + NEAR * 500:
            turns.append(agent.turn())
        status = agent.status()
        agent.tell("quit")
    first, second = turns[0].wall_ms, turns[1].wall_ms
    return {
        "tokenizer": tokenizer.name if tokenizer else "bytes",
        "points": [asdict(_near(turns, point)) for point in POINTS],
        "turns": len(turns),
        "cpu_s": round(sum(turn.cpu_ms for turn in turns) / 1000, 3),
        "session_mib": round(status["rss_mib"] - start_mib, 1),
        "first_over_second_ms": round(first - second, 1),
    }


def _near(turns: Sequence[TurnCost], point: int) -> TurnCost:
    nearest = sorted(turns[1:], key=lambda turn: abs(turn.prompt_tokens - point))[:NEAR]
    return TurnCost(
        round(statistics.median(turn.prompt_tokens for turn in nearest)),
        round(statistics.median(turn.body_bytes for turn in nearest)),
        round(statistics.median(turn.cpu_ms for turn in nearest), 2),
        round(statistics.median(turn.wall_ms for turn in nearest), 2),
    )


class Agent:
    """A client that replays its whole history every turn."""

    def __init__(self, gateway: subprocess.Popen[str]) -> None:
        self._gateway = gateway
        told = self._line()
        self._key = told["key"]
        self._http = http.client.HTTPConnection("127.0.0.1", told["port"])
        self._source = Path(argparse.__file__).read_text(encoding="utf-8")
        self._place = 0
        first = self._slice(int(FIRST_PROMPT_TOKENS * told["chars_per_token"]))
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": first}]

    def status(self) -> dict[str, Any]:
        """Return CPU seconds and memory of the gateway's process."""
        self.tell("status")
        return self._line()

    def tell(self, word: str) -> None:
        """Send a word to the gateway's process."""
        assert self._gateway.stdin
        self._gateway.stdin.write(word + "\n")
        self._gateway.stdin.flush()

    def turn(self) -> TurnCost:
        """Ask once, note the reply, answer its call."""
        body = json.dumps(
            {
                "model": "swerl",
                "max_tokens": 4096,
                "stream": True,
                "system": "You are a coding agent. " * 400,
                "tools": TOOLS,
                "messages": self._messages,
            }
        ).encode()
        before, began = self.status()["cpu_s"], time.perf_counter()
        headers = {"x-api-key": self._key, "Content-Type": "application/json"}
        self._http.request("POST", "/v1/messages", body, headers)
        events = self._http.getresponse().read()
        wall_s = time.perf_counter() - began
        cpu_s = self.status()["cpu_s"] - before
        return TurnCost(self._note(events), len(body), cpu_s * 1000, wall_s * 1000)

    def _note(self, events: bytes) -> int:
        """Put the reply and its result into the history; return the prompt's tokens."""
        data = [line[6:] for line in events.splitlines() if line.startswith(b"data: ")]
        read = [json.loads(line) for line in data]
        usage = read[0]["message"]["usage"]
        call = next(e["content_block"] for e in read if e["type"] == "content_block_start")
        written = next(e["delta"] for e in read if e["type"] == "content_block_delta")
        call["input"] = json.loads(written["partial_json"])
        result = {
            "type": "tool_result",
            "tool_use_id": call["id"],
            "content": self._slice(RESULT_CHARS),
        }
        self._messages.append({"role": "assistant", "content": [call]})
        self._messages.append({"role": "user", "content": [result]})
        return int(usage["input_tokens"]) + int(usage["cache_read_input_tokens"])

    def _slice(self, num_chars: int) -> str:
        start = self._place % (len(self._source) - num_chars)
        self._place += num_chars
        return self._source[start : start + num_chars]

    def _line(self) -> dict[str, Any]:
        assert self._gateway.stdout
        line: dict[str, Any] = json.loads(self._gateway.stdout.readline())
        return line


async def serve(tokenizer: Path | None) -> None:
    """Be the gateway's process: serve one session, answer `status` lines until `quit`."""
    from swerl.chat import Finish, Message, Role, ToolCall
    from swerl.families import tiny
    from swerl.gateway.app import Gateway
    from swerl.gateway.limits import SessionLimits
    from swerl.turn import Completion, Sampling

    family = tiny.build(tokenizer)
    call = ToolCall("", "Tool1", {"command": "sed -n 1,40p src/main.py && grep -rn def . " * 3})
    said = tuple(family.encode_reply(Message(Role.ASSISTANT, tool_calls=(call,))))
    logprobs = (-0.5,) * len(said)

    class Instant:
        """An engine that has its reply ready and reads nothing."""

        async def generate(
            self, ids: Sequence[int], sampling: Sampling, session: str
        ) -> Completion:
            return Completion(said, logprobs, Finish.STOP, "v1", len(ids), len(ids) - 1)

    limits = SessionLimits(max_turns=10_000, requests_per_minute=10**6, max_context_tokens=10**6)
    async with Gateway(engine=Instant(), family=family) as gateway:  # type: ignore[arg-type]
        session = gateway.open("bench", sampling=Sampling(4096), limits=limits)
        text = Path(argparse.__file__).read_text(encoding="utf-8")[:20_000]
        per_token = len(text) / (len(family.encode_reply(Message(Role.ASSISTANT, text))) - 1)
        port = int(gateway.url.rsplit(":", 1)[1])
        _tell({"port": port, "key": session.key, "chars_per_token": per_token})
        while (await asyncio.to_thread(sys.stdin.readline)).strip() == "status":
            _tell({"cpu_s": time.process_time(), "rss_mib": _rss_mib()})


def _tell(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _rss_mib() -> float:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    lines = ["| prompt tokens | body | gateway CPU a turn | wall a turn |", "|---|---|---|---|"]
    for point in figures["points"]:
        size = f"{point['body_bytes'] / 1000:.0f} kB"
        cost = f"{point['cpu_ms']:.2f} ms | {point['wall_ms']:.1f} ms"
        lines.append(f"| {point['prompt_tokens']:,} | {size} | {cost} |")
    lines.append(
        f"\n{figures['turns']} turns, tokenizer {figures['tokenizer']}: "
        f"{figures['cpu_s']} s of CPU, "
        f"{figures['session_mib']} MiB more memory, "
        f"first request {figures['first_over_second_ms']} ms over the second"
    )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
