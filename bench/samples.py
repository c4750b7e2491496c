"""What it costs to turn a session's tree into rows for the trainer.

    python bench/samples.py [--json FILE]

A session of a million tokens in 200 turns: once mostly heard, as agents work, once mostly sampled,
and once with three sub-agents that share its first half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from swerl.core.chat import Finish
from swerl.core.sample import to_samples
from swerl.core.turn import Trajectory, Turn

NUM_TURNS = 200
NUM_TOKENS = 1_000_000
NUM_RUNS = 9


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    trees = {
        "one chain, 10 % sampled": chain(0.1),
        "one chain, 90 % sampled": chain(0.9),
        "four branches from the middle": branches(0.1),
    }
    figures = [{"tree": name, **measure(tree)} for name, tree in trees.items()]
    lines = ["| tree | rows | tokens in rows | CPU, median | CPU, range |", "|---|---|---|---|---|"]
    for each in figures:
        spread = f"{each['best_ms']:.0f} to {each['worst_ms']:.0f} ms"
        lines.append(
            f"| {each['tree']} | {each['rows']} | {each['tokens']:,} "
            f"| {each['median_ms']:.0f} ms | {spread} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(tree: Trajectory) -> dict[str, float]:
    """Return the rows of a tree and the CPU milliseconds that they took."""
    costs = []
    for _ in range(NUM_RUNS):
        began = time.process_time()
        samples = to_samples(tree, episode="e", task="t")
        costs.append((time.process_time() - began) * 1000)
    return {
        "rows": len(samples),
        "tokens": sum(len(sample.ids) for sample in samples),
        "median_ms": round(statistics.median(costs), 1),
        "best_ms": round(min(costs), 1),
        "worst_ms": round(max(costs), 1),
    }


def chain(sampled: float) -> Trajectory:
    """Return turns that each continue the one before."""
    turns = _turns([number - 1 for number in range(NUM_TURNS)], sampled)
    return Trajectory("s", tuple(turns))


def branches(sampled: float) -> Trajectory:
    """Return four branches that leave a chain in its middle."""
    half = NUM_TURNS // 2
    parents = [number - 1 for number in range(NUM_TURNS)]
    for first in range(half, NUM_TURNS, half // 4):
        parents[first] = half - 1
    return Trajectory("s", tuple(_turns(parents, sampled)))


def _turns(parents: list[int], sampled: float) -> Iterator[Turn]:
    num_tokens = NUM_TOKENS // NUM_TURNS
    num_sampled = int(num_tokens * sampled)
    for index, parent in enumerate(parents):
        yield Turn(
            index=index,
            parent=parent if parent >= 0 else None,
            prompt_ids=tuple(range(num_tokens - num_sampled)),
            output_ids=tuple(range(num_sampled)),
            logprobs=tuple(-number / 7 for number in range(num_sampled)),
            finish=Finish.STOP,
            weight_version="v1",
        )


if __name__ == "__main__":
    main()
