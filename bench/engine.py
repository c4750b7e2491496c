"""Tokens per second of torch-cpu, over HTTP as agents use it, beside transformers.generate.

`python bench/engine.py [--json FILE]`: both serve the same random 0.46M-parameter Qwen3 on one
thread, in turns, and the best of `--rounds` counts, so that a busy machine hurts both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from swerl.core.contracts import EngineSetup
from swerl.core.turn import Sampling
from swerl.engines import torch_cpu
from swerl.engines._sglang_client import HttpEngine

NUM_PROMPT, NUM_NEW, NUM_VOCAB = 200, 256, 512
"""Context lengths of the twin: a few turns of a few dozen tokens on a short prompt."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Speed:
    """One line of the table; rates in tokens per second over the whole batch."""

    engine: str
    batch: int
    prefill: float
    decode: float


async def measure(folder: Path, batches: list[int], num_rounds: int) -> list[Speed]:
    """Measure both engines at each batch size."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    setup = EngineSetup(family=None, log_dir=folder, model=folder)  # type: ignore[arg-type]
    async with torch_cpu.open(torch_cpu.Options(), setup) as engine:
        contestants = {"torch-cpu": through(engine), "transformers": directly(model)}
        for generate in contestants.values():
            await generate(prompts(2), 4)
        return [
            await best(name, generate, batch, num_rounds)
            for batch in batches
            for name, generate in contestants.items()
        ]


def through(engine: HttpEngine) -> Generate:
    """Generate with one HTTP request a prompt."""

    async def generate(batch: Prompts, num_new: int) -> None:
        requests = [
            engine.generate(ids, Sampling(num_new, seed=n), f"s{n}") for n, ids in enumerate(batch)
        ]
        assert all(len(reply.ids) == num_new for reply in await asyncio.gather(*requests))

    return generate


def directly(model: Qwen3ForCausalLM) -> Generate:
    """Generate with transformers on the same thread."""

    async def generate(batch: Prompts, num_new: int) -> None:
        ids_BT = torch.tensor(batch)
        reply = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=True,
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            pad_token_id=0,
        )
        assert reply.shape[1] == ids_BT.shape[1] + num_new

    return generate


async def best(name: str, generate: Generate, batch: int, num_rounds: int) -> Speed:
    """Return the fastest of several rounds, each on prompts that no cache has seen."""
    first_s, whole_s = [], []
    for _ in range(num_rounds):
        first_s.append(await timed(generate, prompts(batch), 1))
        whole_s.append(await timed(generate, prompts(batch), NUM_NEW))
    return Speed(
        engine=name,
        batch=batch,
        prefill=batch * NUM_PROMPT / min(first_s),
        decode=batch * (NUM_NEW - 1) / (min(whole_s) - min(first_s)),
    )


async def timed(generate: Generate, batch: Prompts, num_new: int) -> float:
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    await generate(batch, num_new)
    return time.perf_counter() - started


def prompts(num: int) -> Prompts:
    """Return random prompts of NUM_PROMPT ids."""
    return torch.randint(0, NUM_VOCAB, (num, NUM_PROMPT)).tolist()


def save_model(folder: Path) -> None:
    """Save the twin's model shape with random weights and no end token."""
    config = Qwen3Config(
        vocab_size=NUM_VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Print a table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        speeds = asyncio.run(measure(Path(name), args.batches, args.rounds))
    lines = [f"{'engine':14}{'batch':>6}{'prefill tok/s':>15}{'decode tok/s':>14}"]
    lines += [f"{s.engine:14}{s.batch:6}{s.prefill:15,.0f}{s.decode:14,.0f}" for s in speeds]
    sys.stdout.write("\n".join(lines) + f"\nload average at the start: {load:.1f}\n")
    if args.json:
        report = {"load": load, "speeds": [asdict(speed) for speed in speeds]}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
