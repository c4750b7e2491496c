"""Seconds that a step costs besides rollout and training, at the size of an 8-node run.

    python bench/controller.py [--json FILE] [--routed] [--tokens N] [--repeats N]

64 Episodes of 8 Tasks, 96,000 tokens each in 200 Turns of which a fifth is sampled; every fourth
Episode has two conversations of half the length. While Episodes run, each reply and each Episode:

`spool`     the experts of each reply, to disk (gateway)
`record`    the Episode's folder (controller)

Then, in the order of a step:

`collect`   advantages and Samples from the trees (controller)
`turns`     the table of Turns (controller)
`write`     the Batch as a Parquet file, which is also what the run keeps (controller)
`read`      the file on a rank: every rank reads all rows
`pack`      rows over 4 data-parallel ranks, 96,000 tokens a micro-batch (every rank)
`tensors`   the rank's own rows as tensors
`logprobs`  the trainer's log-probabilities as a Parquet file (controller)

`--routed` gives every position the experts of 40 layers, 8 of 256: 30.7 MB a trajectory. Only
those of a rank's own rows are read then, in `tensors`. The best repeat counts, as the machine may
be busy, and processor time stands beside; of `spool` and `record`, done once, the sum counts, and
the longest that one reply and one Episode took. The peak is that of one process which is gateway,
controller and rank at once: `held` is what it was before `tensors`. Ids and experts are random
numbers, which compress worst.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import torch

from swerl.core.chat import Finish
from swerl.core.episode import Episode, Group, Status
from swerl.core.experts import ExpertSpool
from swerl.core.grade import Grade, Verdict
from swerl.core.turn import RoutedExperts, Trajectory, Turn
from swerl.plan.parameters import row_cost
from swerl.plan.shape import shape_of
from swerl.recipe.schema import ModelSection
from swerl.rollout import record
from swerl.runs import tables
from swerl.training import batch as batches
from swerl.training.algorithms import gspo
from swerl.training.batch import collect
from swerl.training.rank.microbatch import rank_micro_batches, to_tensors

NUM_TASKS, NUM_EPISODES, NUM_TURNS = 8, 8, 200
DATA_RANKS = 4
LAYERS, TOP_K = 40, 8
EARLIER = ("spool", "record")
PHASES = ("collect", "turns", "write", "read", "pack", "tensors", "logprobs")


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--routed", action="store_true")
    parser.add_argument("--tokens", type=int, default=96_000, help="tokens of an Episode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; the system's by default")
    args = parser.parse_args()
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        groups, recorded = rolled_out(Path(folder), args)
        for _ in range(args.repeats):
            found = step(groups, Path(folder) / "batch.parquet", args.tokens)
            best = {name: min(found[name], best.get(name, 1e9)) for name in found}
    figures = recorded | best | {"peak_gib": peak_gib()}
    sys.stdout.write(table(figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


@dataclass
class Stopwatch:
    """Seconds of what is done many times."""

    seconds: float = 0.0
    cpu: float = 0.0
    longest: float = 0.0

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Count what happens within."""
        began, began_cpu = time.perf_counter(), time.process_time()
        yield
        took = time.perf_counter() - began
        self.seconds, self.longest = self.seconds + took, max(self.longest, took)
        self.cpu += time.process_time() - began_cpu


def rolled_out(folder: Path, args: argparse.Namespace) -> tuple[list[Group], dict[str, float]]:
    """Return a step's Groups, their Episodes written one by one, and the seconds that took."""
    rng, spooling, recording = random.Random(0), Stopwatch(), Stopwatch()
    spool = ExpertSpool(folder / "spool")

    def keep(name: str, piece: RoutedExperts) -> RoutedExperts:
        with spooling.lap():
            return spool.keep(name, piece)

    def recorded(task: int, k: int) -> Episode:
        made = episode(rng, task, k, args, keep)
        with recording.lap():
            kept = record.write(folder / made.id, made)
            spool.drop(made.id)
        return kept

    groups = [
        Group(f"t{task}", tuple(recorded(task, k) for k in range(NUM_EPISODES)))
        for task in range(NUM_TASKS)
    ]
    figures: dict[str, float] = {}
    for name, watch in (("spool", spooling), ("record", recording)):
        figures |= {name: watch.seconds, f"{name}_cpu": watch.cpu, f"{name}_longest": watch.longest}
    return groups, figures


def episode(
    rng: random.Random,
    task: int,
    k: int,
    args: argparse.Namespace,
    keep: Callable[[str, RoutedExperts], RoutedExperts],
) -> Episode:
    """Return an Episode; every fourth has two conversations."""
    name = f"0/t{task}.{k}"
    turns: list[Turn] = []
    num_roots = 2 if k % 4 == 0 else 1
    size = args.tokens // NUM_TURNS
    for index in range(NUM_TURNS):
        is_root = index % (NUM_TURNS // num_roots) == 0
        start = 0 if is_root else (index % (NUM_TURNS // num_roots)) * size - 1
        num_positions = size - is_root
        data = os.urandom(num_positions * LAYERS * TOP_K) if args.routed else b""
        routed = keep(name, RoutedExperts(start, LAYERS, TOP_K, 1, data)) if data else None
        num_sampled = size // 5
        ids = tuple(array("I", rng.randbytes(4 * size)))
        ids = tuple(one % 248_320 for one in ids)
        logprobs = tuple(-rng.random() for _ in range(num_sampled))
        turns.append(
            Turn(
                index=index,
                parent=None if is_root else index - 1,
                prompt_ids=ids[num_sampled:],
                output_ids=ids[:num_sampled],
                logprobs=logprobs,
                finish=Finish.STOP,
                weight_version="1",
                routed=routed,
            )
        )
    verdict = Verdict.SOLVED if k % 2 else Verdict.UNSOLVED
    trajectory = Trajectory(name, tuple(turns))
    return Episode(name, f"t{task}", Status.COMPLETED, Grade(verdict, ""), float(k % 2), trajectory)


def step(groups: list[Group], path: Path, tokens: int) -> dict[str, float]:
    """Take every phase once; return seconds, and the file's size."""
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        began, began_cpu = time.perf_counter(), time.process_time()
        yield
        seconds[name] = time.perf_counter() - began
        cpu[name] = time.process_time() - began_cpu

    algorithm = gspo.build(gspo.Options())
    cost = row_cost(shape_of(ModelSection(path=Path("Qwen3.6-35B-A3B"))))
    with phase("collect"):
        collected = collect(0, groups, algorithm)
    with phase("turns"):
        episodes = [episode for group in groups for episode in group.episodes]
        tables.write_turns(path.with_name("turns.parquet"), episodes)
    with phase("write"):
        batches.write(path, collected.batch)
    with phase("read"):
        batch = batches.read(path)
    with phase("pack"):
        micro_batches = rank_micro_batches(
            batch, rank=0, num_ranks=DATA_RANKS, budget=tokens, cost=cost
        )
    held = peak_gib()
    with phase("tensors"):
        for rows in micro_batches:
            to_tensors(rows, all_tokens=False, device=torch.device("cpu"))
    trained = [(row.episode, array("f", compress(row.logprobs, row.mask))) for row in batch.samples]
    with phase("logprobs"):
        tables.write_logprobs(path.with_name("logprobs.parquet"), trained)
    seconds["total"], cpu["total"] = sum(seconds.values()), sum(cpu.values())
    in_cpu = {f"{name}_cpu": value for name, value in cpu.items()}
    return seconds | in_cpu | {"file_mb": path.stat().st_size / 1e6, "held_gib": held}


def peak_gib() -> float:
    """Return the most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def table(figures: dict[str, float]) -> str:
    """Return the figures as lines."""
    lines = [
        f"{name:8} {figures[name]:7.3f} s {figures[f'{name}_cpu']:7.3f} s of a core"
        for name in (*EARLIER, *PHASES, "total")
    ]
    for place, name in enumerate(EARLIER):
        lines[place] += f", {figures[f'{name}_longest']:.4f} s at most"
    lines.append(f"file     {figures['file_mb']:7.1f} MB")
    lines.append(f"held     {figures['held_gib']:7.2f} GiB")
    lines.append(f"peak     {figures['peak_gib']:7.2f} GiB")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
