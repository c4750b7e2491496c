"""How full micro-batches are, and how evenly ranks work, against two other ways to pack.

    python bench/packing.py [--json FILE] [--seeds N]

Rows as agents make them: 64 Episodes, each a conversation (median 49,000 tokens) and up to five
shorter ones of sub-agents or after a compaction (median 20,000), log-normal, cut to 2,000 and
96,000 tokens: a made-up distribution, not a measured one. The cost of a row is that of
Qwen3.6-35B-A3B. Budget: 96,000 tokens a micro-batch (12,000 on each of 8 context ranks).

`first-fit` deals rows to ranks in turn and fills micro-batches in the order of arrival. `slime` is
written after what slime does with dynamic batch size and balanced data: Karmarkar-Karp by tokens
over ranks, as many micro-batches as first-fit needs, the rank's rows dealt to them by tokens again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swerl.plan.parameters import RowCost, row_cost
from swerl.plan.shape import shape_of
from swerl.recipe.schema import ModelSection
from swerl.training.rank.packing import differencing, pack

BUDGET = 96_000
NUM_EPISODES = 64
Ranks = Sequence[Sequence[Sequence[int]]]
"""By rank, then by micro-batch: indices of rows."""
Way = Callable[[Sequence[int], RowCost, int], Ranks]


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of the table: means over the seeds, the worst where it says so."""

    way: str
    data_ranks: int
    micro_batches: float
    fill: float
    """Tokens over the budget of all micro-batches."""
    ceiling: float
    """The fill that no way exceeds: ranks run equal, whole numbers of micro-batches."""
    imbalance: float
    """The slowest rank's arithmetic over the mean, less one."""
    worst_imbalance: float
    slot_imbalance: float
    """The same, where ranks wait for each other after each micro-batch."""
    over_budget: int
    """Micro-batches above the budget, of all seeds: out of memory, or a budget lowered for it."""
    milliseconds: float


def main() -> None:
    """Print the table; write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    cost = row_cost(shape_of(ModelSection(path=Path("Qwen3.6-35B-A3B"))))
    batches = [agent_rows(random.Random(seed)) for seed in range(args.seeds)]
    ways: dict[str, Way] = {"swerl": swerl, "first-fit": first_fit, "slime": slime}
    found = [
        measure(name, way, batches, cost, num_ranks)
        for num_ranks in (2, 4, 8)
        for name, way in ways.items()
    ]
    sys.stdout.write(table(found))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def agent_rows(rng: random.Random) -> list[int]:
    """Return the lengths of a step's rows."""
    lengths = []
    for _ in range(NUM_EPISODES):
        medians = [49_000] + [20_000] * rng.randint(0, 5)
        drawn = [median * rng.lognormvariate(0, 0.6) for median in medians]
        lengths += [int(min(96_000, max(2_000, length))) for length in drawn]
    return lengths


def swerl(sizes: Sequence[int], cost: RowCost, num_ranks: int) -> Ranks:
    """Pack as the trainer does."""
    costs = [cost.of(size) for size in sizes]
    return pack(sizes, costs, num_ranks=num_ranks, budget=BUDGET)


def first_fit(sizes: Sequence[int], cost: RowCost, num_ranks: int) -> Ranks:
    """Deal rows in turn; put each into the first micro-batch with room."""
    ranks = [fit_first(range(rank, len(sizes), num_ranks), sizes) for rank in range(num_ranks)]
    most = max(len(rank) for rank in ranks)
    return [rank + [[]] * (most - len(rank)) for rank in ranks]


def slime(sizes: Sequence[int], cost: RowCost, num_ranks: int) -> Ranks:
    """Balance tokens over ranks, then over as many micro-batches as first-fit needs."""
    parts = differencing([float(size) for size in sizes], num_ranks)
    most = max(len(fit_first(sorted(part), sizes)) for part in parts)
    return [
        [
            [part[index] for index in bin_]
            for bin_ in differencing([float(sizes[item]) for item in part], most)
        ]
        for part in parts
    ]


def fit_first(items: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Put each item into the first micro-batch that has room for it."""
    packs: list[list[int]] = []
    for item in items:
        for each in packs:
            if sum(sizes[other] for other in each) + sizes[item] <= BUDGET:
                each.append(item)
                break
        else:
            packs.append([item])
    return packs


def measure(
    name: str, way: Way, batches: Sequence[Sequence[int]], cost: RowCost, num_ranks: int
) -> Figures:
    """Pack every batch and return the means."""
    began = time.process_time()
    packings = [way(sizes, cost, num_ranks) for sizes in batches]
    spent_s = time.process_time() - began
    pairs = list(zip(batches, packings, strict=True))
    imbalances = [imbalance(sizes, packing, cost) for sizes, packing in pairs]
    return Figures(
        way=name,
        data_ranks=num_ranks,
        micro_batches=statistics.mean(len(packing[0]) for packing in packings),
        fill=statistics.mean(
            sum(sizes) / (len(packing[0]) * num_ranks * BUDGET) for sizes, packing in pairs
        ),
        ceiling=statistics.mean(
            sum(sizes) / (-(-sum(sizes) // (num_ranks * BUDGET)) * num_ranks * BUDGET)
            for sizes in batches
        ),
        imbalance=statistics.mean(imbalances),
        worst_imbalance=max(imbalances),
        slot_imbalance=statistics.mean(slot_imbalance(*pair, cost) for pair in pairs),
        over_budget=sum(
            sum(sizes[item] for item in items) > BUDGET
            for sizes, packing in pairs
            for rank in packing
            for items in rank
        ),
        milliseconds=1000 * spent_s / len(batches),
    )


def imbalance(sizes: Sequence[int], ranks: Ranks, cost: RowCost) -> float:
    """Return by how much the slowest rank is above the mean."""
    work = [sum(cost.of(sizes[item]) for items in rank for item in items) for rank in ranks]
    return max(work) / statistics.mean(work) - 1


def slot_imbalance(sizes: Sequence[int], ranks: Ranks, cost: RowCost) -> float:
    """Return the same for ranks that wait for each other after every micro-batch."""
    slots = [
        [sum(cost.of(sizes[item]) for item in items) for items in slot]
        for slot in zip(*ranks, strict=True)
    ]
    return sum(max(slot) for slot in slots) / sum(statistics.mean(slot) for slot in slots) - 1


def table(found: Sequence[Figures]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| data ranks | way | micro-batches | fill | of the ceiling | imbalance, mean (worst) "
        "| per slot | over budget | CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.data_ranks} | {each.way} | {each.micro_batches:.1f} | {each.fill:.1%} "
        f"| {each.fill / each.ceiling:.1%} "
        f"| {each.imbalance:.1%} ({each.worst_imbalance:.1%}) | {each.slot_imbalance:.1%} "
        f"| {each.over_budget} | {each.milliseconds:.0f} ms |"
        for each in found
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
