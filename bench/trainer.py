"""Seconds per optimizer step of the twin's model, by algorithm, ranks and threads.

`python bench/trainer.py [--json FILE]`: each line starts a trainer of its own on the twin's shape
and takes `--steps` steps on random rows of 150 to 190 tokens, a third of them trained. The first
step is a warm-up; the best and the median of the others count, so that a busy machine shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyShape
from swerl.training.options import TrainerOptions
from swerl.training.trainer import MegatronTrainer
from swerl.training.warm_start import make_tiny_model

NUM_ROWS = {"gspo": 64, "sft": 32}
"""Rows of a step: the twin's 8 Tasks x 8 Episodes, and its warm start's batch."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One line of the table, in seconds as the controller sees them."""

    algorithm: str
    ranks: int
    threads: int
    start_s: float
    best_s: float
    median_s: float
    publish_s: float
    save_s: float


async def measure(root: Path, algorithm: str, layout: tuple[int, int], num_steps: int) -> Speed:
    """Start a trainer of `layout` (ranks, threads) and time its steps."""
    ranks, threads = layout
    work = root / f"{algorithm}-{ranks}-{threads}"
    options = TrainerOptions(
        checkpoint_dir=work / "checkpoints",
        publish_dir=work / "weights",
        log_dir=work / "logs",
        ranks=ranks,
        threads=threads,
    )
    trainer = MegatronTrainer(
        model=root / "model", family="tiny", algorithm=algorithm, options=options
    )
    started = time.perf_counter()
    async with trainer:
        start_s = time.perf_counter() - started
        steps = [
            await timed(trainer.step(random_batch(step, NUM_ROWS[algorithm])))
            for step in range(num_steps + 1)
        ][1:]
        publish_s = await timed(trainer.publish())
        save_s = await timed(_save(trainer, num_steps))
    return Speed(algorithm, ranks, threads, start_s, min(steps), median(steps), publish_s, save_s)


async def _save(trainer: MegatronTrainer, step: int) -> None:
    await trainer.save(step)
    await trainer.saved()


async def timed(call: Awaitable[object]) -> float:
    """Return the seconds that an awaitable takes."""
    started = time.perf_counter()
    await call
    return time.perf_counter() - started


def random_batch(step: int, num_rows: int) -> Batch:
    """Return rows of the twin's lengths; every third run of 20 tokens is trained."""
    rng = random.Random(step)
    rows = []
    for number in range(num_rows):
        length = rng.randint(150, 190)
        mask = tuple(int(t > 0 and t // 20 % 3 == 1) for t in range(length))
        rows.append(
            Sample(
                episode=f"episode-{number}",
                task="task",
                ids=tuple(rng.randrange(512) for _ in range(length)),
                mask=mask,
                logprobs=tuple(-6.2 * trained for trained in mask),
                weight_versions=("0",),
                advantage=rng.uniform(-1, 1),
            )
        )
    return Batch(step, tuple(rows), num_rows)


async def run(root: Path, layouts: list[tuple[int, int]], num_steps: int) -> list[Speed]:
    """Measure every algorithm on every layout, one after the other."""
    (root / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), root / "tokenizer")
    make_tiny_model(root / "model", TinyShape(), seed=0, tokenizer=root / "tokenizer", eos_id=2)
    return [
        await measure(root, algorithm, layout, num_steps)
        for algorithm in NUM_ROWS
        for layout in layouts
    ]


def main() -> None:
    """Print a table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--layouts", nargs="+", default=["1x1", "2x1", "1x2"], help="RANKSxTHREADS to compare"
    )
    args = parser.parse_args()
    layouts = [tuple(int(part) for part in text.split("x")) for text in args.layouts]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        speeds = asyncio.run(run(Path(name), layouts, args.steps))
    columns = ("start_s", "best_s", "median_s", "publish_s", "save_s")
    lines = ["algorithm ranks threads" + "".join(f"{column:>11}" for column in columns)]
    for speed in speeds:
        figures = "".join(f"{getattr(speed, column):11.3f}" for column in columns)
        lines.append(f"{speed.algorithm:9} {speed.ranks:5} {speed.threads:7}{figures}")
    sys.stdout.write("\n".join(lines) + f"\nload average at the start: {load:.1f}\n")
    if args.json:
        report = {"load": load, "speeds": [asdict(speed) for speed in speeds]}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
