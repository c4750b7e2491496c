"""Shared prefixes: positions executed over unique ones, and a step's CPU time with and without.

    python bench/prefixes.py [--json FILE] [--scale N] [--steps N]

Rows have the lengths and the common prefixes of those that the agents of `tests/compat`
made with Qwen3's tokenizer, and random tokens. A Group is eight attempts at one Task: system prompt
and task are common, the rest is not. All lengths and budgets are divided by `--scale`. The first
table cuts 64 Episodes into micro-batches, as ranks do. The second takes steps of a small dense
model on one rank, one thread and this process: both ways by turns, the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from _gpu_model import join

from swerl.core.learning import Batch
from swerl.core.sample import Sample
from swerl.engines.families import tiny
from swerl.engines.families.tiny import TinyShape
from swerl.plan.parameters import row_cost
from swerl.plan.shape import shape_of
from swerl.recipe.schema import ModelSection
from swerl.training.options import TrainerOptions, WorkerSettings
from swerl.training.warm_start import make_tiny_model

Row = tuple[int, int]
"""Length, and how many of its tokens the row before it has, too."""
EPISODES: dict[str, tuple[Row, ...]] = {
    "codex, compaction": ((40736, 0), (5573, 4099), (32723, 5366)),
    "codex, sub-agents": ((5483, 0), (5482, 5352), (8370, 5203)),
    "claude-code, compaction": ((79422, 0), (23358, 23036)),
    "claude-code, sub-agents": ((24203, 0), (13989, 17), (13989, 13282)),
    "opencode, compaction": ((4560, 0), (43583, 5), (52609, 7189)),
    "opencode, sub-agents": ((7577, 0), (6427, 5050), (6427, 6329)),
    "qwen-code, compaction": ((39506, 0), (53651, 5), (25596, 16296), (23356, 14124)),
    "qwen-code, sub-agents": ((13638, 0), (13638, 13494), (16765, 5)),
}
"""Agent and case -> rows of an Episode, sorted by tokens."""
SYSTEM, TASK, WORK = 10_800, 400, 9_000
"""Tokens of a Claude Code row: system prompt and tools, the task, the agent's own work."""
VOCAB = 320
COST = row_cost(shape_of(ModelSection(path=Path("Qwen3.6-35B-A3B"))))


@dataclass(frozen=True, slots=True)
class Cut:
    """64 Episodes as micro-batches."""

    rows: str
    ranks: int
    budget: int
    packed: float
    """Tokens of separate rows over unique ones."""
    executed: float
    """Positions that the ranks compute over unique ones."""
    least: float
    """Executed over unique positions that no cut goes below if every rank has a micro-batch: each
    micro-batch has the prefix of all rows."""
    imbalance: float
    """The slowest rank's arithmetic over the mean, less one."""


@dataclass(frozen=True, slots=True)
class Speed:
    """CPU seconds of a step."""

    rows: str
    tokens: int
    packed: float
    separate_s: float
    shared_s: float


def main() -> None:
    """Print both tables; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--scale", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="take steps of rows with this in their name")
    args = parser.parse_args()
    cuts = [
        cut(name, batch, num_ranks, args.scale, budget)
        for name, batch in batches_of(args.scale, 64).items()
        for num_ranks, budget in ((1, 98_304), (4, 98_304), (4, 196_608), (8, 196_608))
    ]
    sys.stdout.write(_table(cuts))
    speeds = [
        measure(name, batch, args.steps)
        for name, batch in batches_of(args.scale, 1).items()
        if args.only in name
    ]
    sys.stdout.write(_table(speeds))
    if args.json:
        found = {"cuts": list(map(asdict, cuts)), "speeds": list(map(asdict, speeds))}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def batches_of(scale: int, num_episodes: int) -> dict[str, Batch]:
    """Return a Batch of every kind of rows, with lengths over `scale`."""
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in EPISODES.items():
        rows: list[Sample] = []
        for episode in range(num_episodes):
            # The Episodes of a step have the first row's beginning in common: the system prompt.
            own = [(length // scale, shared // scale) for length, shared in shape]
            rows += _rows(rng, f"episode-{episode}", own)
        found[name] = _batch(rows)
    groups: list[Sample] = []
    system = _tokens(rng, SYSTEM // scale)
    for number in range(-(-num_episodes // 8)):
        start = system + _tokens(rng, TASK // scale)
        for attempt in range(8):
            length = int(WORK * rng.lognormal(0, 0.5)) // scale
            groups.append(_row(f"{number}-{attempt}", start, _tokens(rng, length)))
    found["Groups of 8, claude-code"] = _batch(groups)
    apart = [_row(f"{row}", _tokens(rng, 1), _tokens(rng, 9_000 // scale)) for row in range(8)]
    found["rows that share nothing"] = _batch(apart)
    return found


def _rows(rng: np.random.Generator, episode: str, shape: Sequence[Row]) -> list[Sample]:
    rows: list[Sample] = []
    for length, shared in shape:
        start = list(rows[-1].ids[:shared]) if shared else _tokens(rng, 1)
        rows.append(_row(episode, start, _tokens(rng, length - len(start))))
    return rows


def _tokens(rng: np.random.Generator, number: int) -> list[int]:
    return rng.integers(0, VOCAB, number).tolist()


def _row(episode: str, start: list[int], own: list[int]) -> Sample:
    """Return a row that trains every fourth token of its own."""
    mask = np.arange(-len(start), len(own)) % 4 == 3
    mask[: len(start)], mask[-1] = False, True
    columns = array("b", mask.astype(np.int8).tobytes()), array("d", (-5.8 * mask).tobytes())
    return Sample(episode, "task", array("i", start + own), *columns, ("0",), advantage=1.0)


def _batch(rows: Sequence[Sample]) -> Batch:
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.episode] = totals.get(row.episode, 0) + row.num_trained_tokens
    voting = (replace(row, share=row.num_trained_tokens / totals[row.episode]) for row in rows)
    return Batch(0, tuple(voting), len(totals))


def cut(name: str, batch: Batch, num_ranks: int, scale: int, budget: int) -> Cut:
    """Cut a Batch as the ranks do, by the cost of Qwen3.6-35B-A3B."""
    from swerl.training.rank.microbatch import _prefixes, rank_micro_batches

    cost = replace(COST, per_token_pair=COST.per_token_pair * scale)
    executed, work = 0, []
    for rank in range(num_ranks):
        rows = [
            (len(row.sample.ids) - 1, row.shared)
            for pack in rank_micro_batches(
                batch,
                rank=rank,
                num_ranks=num_ranks,
                budget=budget // scale,
                cost=cost,
                forest=True,
            )
            for row in pack
            if row.weight
        ]
        executed += sum(length - shared for length, shared in rows)
        work.append(sum(cost.of(length) - cost.of(shared) for length, shared in rows))
    unique, packed = _sizes(batch)
    prefix = min(_prefixes(batch.samples, replay=False).common[1:])
    num_packs = max(num_ranks, -(-(unique - prefix) // (budget // scale - prefix)))
    return Cut(
        name,
        num_ranks,
        budget,
        packed / unique,
        executed / unique,
        least=1 + (num_packs - 1) * prefix / unique,
        imbalance=max(work) * num_ranks / sum(work) - 1,
    )


def _sizes(batch: Batch) -> tuple[int, int]:
    """Return the unique input positions of a Batch, and those of its separate rows."""
    from swerl.training.rank.microbatch import _prefixes

    packed = sum(len(row.ids) - 1 for row in batch.samples)
    return packed - sum(_prefixes(batch.samples, replay=False).common), packed


def measure(name: str, batch: Batch, num_steps: int) -> Speed:
    """Take steps with and without shared prefixes by turns; return the best of each."""
    with tempfile.TemporaryDirectory() as folder:
        learners = _learners(Path(folder))
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(num_steps + 1):
            for shares, learner in learners.items():
                began = time.process_time()
                learner.step(batch)
                seconds[shares].append(time.process_time() - began)
    unique, packed = _sizes(batch)
    # The first step is a warm-up.
    separate_s, shared_s = (min(seconds[shares][1:]) for shares in (False, True))
    return Speed(name, packed, packed / unique, separate_s, shared_s)


def _learners(folder: Path) -> dict[bool, Any]:
    import torch

    from swerl.training.algorithms import cispo

    torch.set_num_threads(1)
    (folder / "tokenizer").mkdir()
    tiny.save_tokenizer(tiny.byte_tokenizer(), folder / "tokenizer")
    shape = TinyShape(
        vocab_size=VOCAB,
        hidden_size=256,
        ffn_hidden_size=768,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )
    model = make_tiny_model(
        folder / "model", shape, seed=0, tokenizer=folder / "tokenizer", eos_id=2
    )
    learners = {}
    for shares in (False, True):
        options = TrainerOptions(
            checkpoint_dir=folder,
            publish_dir=folder,
            log_dir=folder,
            tokens_per_micro_batch=16_384,
            shared_prefixes=shares,
        )
        join(options)
        from swerl.training.rank.learner import Learner

        settings = WorkerSettings.model_construct(
            model=model, family="tiny", options=options, rank=0
        )
        algorithm = cispo.build(cispo.Options())
        learners[shares] = Learner(settings, tiny.build(model), algorithm)
    return learners


def _table(found: Sequence[Cut] | Sequence[Speed]) -> str:
    rows = [asdict(each) for each in found]
    if not rows:
        return ""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        values = (
            f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()
        )
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
