"""Measure the gateway: CPU, memory and latency, with an engine behind HTTP that answers at once.

    python bench/gateway.py [--only CASE …] [--agents N] [--json FILE]

Agents replay their whole history every turn, in Anthropic Messages with streaming and 15 tools,
over 400 new tokens a turn, each over its own connection. The engine has SGLang's contract and runs
in another process, as in every run on GPUs. The family is qwen3, with the tokenizer and template
beside the checkout; if they are absent it is `tiny`, over bytes.

    turn      CPU of one turn by length of history; memory of a session; the first request
    load      64 sessions at 42,000 tokens: one process on one core
    agents    1,024 agents, each a turn every 10 s: one process, one core
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from _gateway_agents import Agent, Served, Turn, drive, served

ROOT = Path(__file__).resolve().parents[1]
TOKENIZERS = ROOT / "../shared/tokenizers"
POINTS = (11_000, 48_000, 94_000)
NEAR = 8
"""Turns around a point whose median is its cost."""
SESSION_TURNS = 200
NUM_SESSIONS = 4
LOAD_SESSIONS, LOAD_TURNS, LOAD_TOKENS = 64, 6, 41_000
FIRST_TOKENS, NUM_FIRST = 40_000, 5
AGENT_TOKENS, PERIOD_S = (30_000, 96_000), 10.0
REPLY_S = 3.0
"""Seconds after which the engine behind a URL answers; not counted as the gateway's."""
SETTLE_S = 0.005
"""Seconds after a turn for the gateway's work behind its answer."""
STOPS = ("<|im_end|>", "<|endoftext|>")

Case = Callable[[str, argparse.Namespace], list[dict[str, Any]]]


def main() -> None:
    """Run the cases and print their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--agents", type=int, default=1024, help="of the case `agents`")
    parser.add_argument("--turns", type=int, default=6, help="of each agent in the case `agents`")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    figures: dict[str, Any] = {"cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        for name in options.only:
            figures[name] = CASES[name](model, options)
            show(name, figures[name])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def model_folder(folder: Path) -> str:
    """Write tokenizer and template as a model folder has them; `-` if there are none."""
    if not TOKENIZERS.is_dir():
        _say("qwen3's tokenizer is not beside the checkout: measuring `tiny`, over bytes\n")
        return "-"
    spec = json.loads((TOKENIZERS / "qwen3/tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    shutil.copy(TOKENIZERS / "qwen3/tokenizer.json", folder)
    shutil.copy(TOKENIZERS / "templates/qwen3.jinja", folder / "chat_template.jinja")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": STOPS[0]}))
    stops = {"eos_token_id": [ids[stop] for stop in STOPS]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    return str(folder)


@contextmanager
def behind_url(
    model: str, num_sessions: int, reply_s: float = 0.0, kind: str = "url"
) -> Iterator[Served]:
    """Run a gateway pinned to one core; this process and the engine get the rest."""
    rest = sorted(os.sched_getaffinity(0) - {0}) or [0]
    os.sched_setaffinity(0, rest)
    with (
        tempfile.TemporaryDirectory() as logs,
        served("engine", model, reply_s, cores=rest) as engine,
        served(kind, model, num_sessions, engine.url, logs, cores=[0]) as gateway,
    ):
        yield gateway


def measure_turn(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Conversations past the last point, one request at a time, and the floor below them."""
    with behind_url(model, NUM_SESSIONS + 2 * NUM_FIRST) as gateway:
        rows = [*_conversations(gateway), *asyncio.run(_first_turns(gateway))]
    with behind_url(model, 1, kind="floor") as gateway:
        turns, costs = asyncio.run(_converse(gateway, 0, SESSION_TURNS))
    floor = [_point(turns[1:], costs[1:], point) for point in POINTS]
    return [*rows, *({**row, "what": f"the floor of {row['what']}"} for row in floor)]


def measure_load(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Many sessions at once; the gateway is pinned to one core."""
    with behind_url(model, LOAD_SESSIONS) as gateway:
        return [{"what": "one process on one core", **_loaded(gateway)}]


async def _first_turns(gateway: Served) -> list[dict[str, Any]]:
    """Begin sessions with a long history, each twice: CPU of the loop's thread, of all threads."""
    rows = []
    async with aiohttp.ClientSession() as http:
        for first, again in ((NUM_SESSIONS, ""), (NUM_SESSIONS + NUM_FIRST, ", seen before")):
            loop_ms, cpu_ms = list[float](), list[float]()
            for number in range(NUM_FIRST):
                before_s, loop_s = gateway.cpu_s()[0], gateway.loop_s()
                agent = Agent(gateway, first + number, FIRST_TOKENS, place=number)
                turn = await agent.turn(http)
                await asyncio.sleep(SETTLE_S)
                loop_ms.append(1000 * (gateway.loop_s() - loop_s))
                cpu_ms.append(1000 * (gateway.cpu_s()[0] - before_s))
            rows.append(
                {
                    "what": f"first turn of {turn.prompt_tokens:,} tokens{again}",
                    "CPU ms": round(statistics.median(cpu_ms), 1),
                    "of the loop ms": round(statistics.median(loop_ms), 1),
                    "body kB": round(turn.body_bytes / 1000),
                }
            )
    return rows


def _conversations(gateway: Served) -> list[dict[str, Any]]:
    memory = [gateway.rss_mib()[0]]
    turns, costs = asyncio.run(_converse(gateway, 0, SESSION_TURNS))
    memory.append(gateway.rss_mib()[0])
    for number in range(1, NUM_SESSIONS):
        asyncio.run(_converse(gateway, number, SESSION_TURNS))
    memory.append(gateway.rss_mib()[0])
    held = f"{SESSION_TURNS} turns, {turns[-1].prompt_tokens:,} tokens"
    further = (memory[2] - memory[1]) / (NUM_SESSIONS - 1)
    first = 1000 * (turns[0].wall_s - turns[1].wall_s)
    return [
        *(_point(turns[1:], costs[1:], point) for point in POINTS),
        {"what": f"the first session of {held}", "MiB": round(memory[1] - memory[0], 1)},
        {"what": "each further one", "MiB": round(further, 1)},
        {"what": "first request over the second", "wall ms": round(first, 1)},
    ]


async def _converse(gateway: Served, number: int, count: int) -> tuple[list[Turn], list[float]]:
    """Run one agent's turns; return them and the milliseconds of CPU of each."""
    agent, turns, costs = Agent(gateway, number, POINTS[0]), list[Turn](), list[float]()
    spent_s = gateway.cpu_s()[0]
    async with aiohttp.ClientSession() as http:
        for _ in range(count):
            turns.append(await agent.turn(http))
            await asyncio.sleep(SETTLE_S)
            before_s, spent_s = spent_s, gateway.cpu_s()[0]
            costs.append(1000 * (spent_s - before_s))
    return turns, costs


def _point(turns: Sequence[Turn], costs: Sequence[float], point: int) -> dict[str, Any]:
    pairs = sorted(
        zip(turns, costs, strict=True), key=lambda pair: abs(pair[0].prompt_tokens - point)
    )[:NEAR]
    tokens = statistics.median(turn.prompt_tokens for turn, _ in pairs)
    return {
        "what": f"a turn at {tokens:,.0f} tokens",
        "CPU ms": round(statistics.median(cost for _, cost in pairs), 2),
        "least CPU ms": round(min(cost for _, cost in pairs), 2),
        "wall ms": round(1000 * statistics.median(turn.wall_s for turn, _ in pairs), 1),
        "body kB": round(statistics.median(turn.body_bytes for turn, _ in pairs) / 1000),
    }


def measure_agents(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A thousand agents at their usual pace, with histories of 30,000 to 96,000 tokens."""
    count = options.agents
    with behind_url(model, count, REPLY_S) as gateway:
        steps = [number / max(1, count - 1) for number in range(count)]
        random.Random(0).shuffle(steps)
        first, last = AGENT_TOKENS
        agents = [
            Agent(gateway, number, round(first + step * (last - first)))
            for number, step in enumerate(steps)
        ]
        _, failed = asyncio.run(drive(agents, 1, at_once=32))  # encodes the first prompts
        before, began = gateway.cpu_s()[0], time.perf_counter()
        turns, errors = asyncio.run(drive(agents, options.turns, period_s=PERIOD_S))
        spent_s, wall_s = gateway.cpu_s()[0] - before, time.perf_counter() - began
        memory = gateway.rss_mib()[0]
        closed = gateway.ask("close")
    for error in sorted({*failed, *errors})[:5]:
        _say(f"error: {error}\n")
    waits = sorted(turn.wall_s - REPLY_S for turn in turns)
    return [
        {
            "what": f"{count:,} agents, a turn every {PERIOD_S:g} s",
            "turns": len(turns),
            "errors": len(errors) + len(failed),
            "turns in the trees": closed["turns"],
            "mean tokens": round(statistics.fmean(turn.prompt_tokens for turn in turns)),
            "CPU ms a turn": round(1000 * spent_s / len(turns), 2),
            "share of the core": f"{100 * spent_s / wall_s:.0f} %",
            "added p50 ms": round(1000 * waits[len(waits) // 2]),
            "added p99 ms": round(1000 * waits[int(len(waits) * 0.99)]),
            "MiB": round(memory),
            "load average": round(os.getloadavg()[0], 1),
        }
    ]


def _loaded(gateway: Served) -> dict[str, Any]:
    agents = [Agent(gateway, number, LOAD_TOKENS) for number in range(LOAD_SESSIONS)]
    asyncio.run(drive(agents, 1))  # the first prompts are long; what comes after is measured
    before, began = gateway.cpu_s()[0], time.perf_counter()
    turns, errors = asyncio.run(drive(agents, LOAD_TURNS))
    spent_s, wall_s = gateway.cpu_s()[0] - before, time.perf_counter() - began
    waits = sorted(turn.wall_s for turn in turns)
    return {
        "turns/s": round(len(turns) / wall_s, 1),
        "p50 ms": round(1000 * waits[len(waits) // 2]),
        "p99 ms": round(1000 * waits[int(len(waits) * 0.99)]),
        "CPU ms a turn": round(1000 * spent_s / len(turns), 2),
        "errors": len(errors),
    }


CASES: dict[str, Case] = {
    "turn": measure_turn,
    "load": measure_load,
    "agents": measure_agents,
}


def show(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"\n{name}", " | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row.get(column, "")) for column in columns) for row in rows]
    _say("\n".join([lines[0], *(f"| {line} |" for line in lines[1:])]) + "\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
