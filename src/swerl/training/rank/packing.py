"""Spread rows over ranks and micro-batches: every row once, within the budget, balanced.

A pack is one micro-batch of one rank. All ranks get the same number of packs, or their collective
calls would wait for each other for ever. The number is the smallest for which packs are found:

1. Rows are dealt by cost with the Karmarkar-Karp differencing method. If every pack fits the
   budget, that is the answer.
2. Otherwise packs are filled: best-fit decreasing, or one by one, the longest remaining row first
   and then the rows that come closest to the capacity (a subset sum). Neither is always better, so
   both are tried. The smallest capacity that yields few enough packs keeps them even.

Packs of similar cost then share a slot, one per rank, and Karmarkar-Karp assigns them to ranks. So
ranks do not wait for each other within a step nor, if experts are spread over them, in a slot.

Rows that share prefixes are sorted, so that the rows with the longest common prefixes are
neighbours: a forest in the order of its leaves. It is cut into runs of rows, which are packed as
rows are. A run's first row is whole; every other row adds only what the row before it has not.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swerl.core.errors import TrainerError
from swerl.plan.parameters import RowCost

_GRAIN = 4096
"""Resolution of the subset sum: a finer one is slower and fills at most 0.1 % more."""
_SLACKS = (1.002, 1.005, 1.01, 1.02, 1.04, 1.08)
"""Capacities to try, relative to an even pack."""

Packs = tuple[tuple[tuple[int, ...], ...], ...]
"""By rank, then by micro-batch: indices of rows. Packs are empty if there are too few rows."""


@dataclass(frozen=True, slots=True)
class _Deal:
    """Bins of items and the sum of each, the fullest first."""

    sums: tuple[float, ...]
    bins: tuple[tuple[int, ...], ...]

    @property
    def spread(self) -> float:
        return self.sums[0] - self.sums[-1]


def pack(sizes: Sequence[int], costs: Sequence[float], *, num_ranks: int, budget: int) -> Packs:
    """Spread rows of `sizes` positions over ranks, with at most `budget` positions per pack.

    Raises TrainerError on a row over the budget: a cut row would train tokens without the prefix
    that they were sampled after, and a long one would break the memory plan.
    """
    longest = max(sizes)
    if longest > budget:
        message = f"a row of {longest} positions is over the budget of {budget} a micro-batch"
        hint = f"raise trainer.tokens_per_micro_batch or context_parallel to hold {longest}"
        raise TrainerError(message, hint=hint)
    # Fewer slots than this cannot hold all positions.
    num_slots = -(-sum(sizes) // (num_ranks * budget))
    while not (packs := _packs(sizes, costs, num_slots * num_ranks, budget)):
        num_slots += 1
    return _to_ranks(packs, costs, num_ranks)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Rows in the order of a forest's leaves."""

    order: tuple[int, ...]
    """Indices of the rows."""
    common: tuple[int, ...]
    """By place in the order: positions in common with the row before; 0 for the first."""

    @classmethod
    def of(cls, keys: Sequence[bytes], width: int) -> Prefixes:
        """Sort rows by their keys, which have `width` bytes for each position."""
        order = sorted(range(len(keys)), key=keys.__getitem__)
        pairs = pairwise(order)
        return cls(tuple(order), (0, *(_common(keys[a], keys[b]) // width for a, b in pairs)))

    @property
    def shares(self) -> bool:
        return any(self.common)

    def shared(self, places: Sequence[int]) -> list[int]:
        """Return how many positions each of some rows, by rising place, has from the one before."""
        pairs = pairwise(places)
        # Two rows have in common what all neighbours between them have.
        return [0, *(min(self.common[a + 1 : b + 1]) for a, b in pairs)][: len(places)]


def pack_forest(
    sizes: Sequence[int],
    prefixes: Prefixes,
    cost: RowCost,
    *,
    num_ranks: int,
    budget: int,
    pad: Callable[[int], int] = int,
) -> Packs:
    """Spread rows that share prefixes; the result has places in `prefixes`, in rising order.

    `sizes` are those of whole rows, by place; `pad` returns the padded length of a segment. Long
    runs repeat few positions, short ones balance the ranks: several lengths are tried, and the one
    whose slowest rank has least to do is taken.
    """

    def size_of(run: Sequence[int]) -> int:
        pairs = zip(run, prefixes.shared(run), strict=True)
        return sum(pad(sizes[place] - shared) for place, shared in pairs)

    def cost_of(run: Sequence[int]) -> float:
        pairs = zip(run, prefixes.shared(run), strict=True)
        return sum(cost.of(sizes[place]) - cost.of(shared) for place, shared in pairs)

    even = size_of(range(len(sizes))) // num_ranks
    longest = max(map(pad, sizes))
    limits = {budget, *(max(longest, min(budget, even // part)) for part in (1, 2, 4, 8)), 0}
    found: dict[Packs, float] = {}
    for limit in sorted(limits, reverse=True):
        runs = _runs(sizes, prefixes.common, limit, pad)
        run_sizes, costs = list(map(size_of, runs)), list(map(cost_of, runs))
        packs = pack(run_sizes, costs, num_ranks=num_ranks, budget=budget)
        whole: Packs = tuple(
            tuple(tuple(sorted(place for run in pack for place in runs[run])) for pack in rank)
            for rank in packs
        )
        found[whole] = max(sum(map(cost_of, rank)) for rank in whole)
    return min(found, key=found.__getitem__)


def _common(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    import numpy as np

    length = min(len(one), len(other))
    differs = np.frombuffer(one, np.uint8, length) != np.frombuffer(other, np.uint8, length)
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _runs(
    sizes: Sequence[int], common: Sequence[int], limit: int, pad: Callable[[int], int]
) -> list[tuple[int, ...]]:
    """Cut the order into runs of at most `limit` positions, or one row, that repeat fewest.

    `repeated[end]` is the number of positions that the best cut of the rows before `end` repeats.
    """
    repeated, begins = [0], [0]
    for end in range(1, len(sizes) + 1):
        best, begin, added = repeated[end - 1] + common[end - 1], end - 1, 0
        for first in range(end - 1, -1, -1):
            if first < end - 1 and pad(sizes[first]) + added > limit:
                break
            if repeated[first] + common[first] <= best:
                best, begin = repeated[first] + common[first], first
            # A cut between rows that share nothing costs nothing.
            if not common[first]:
                break
            added += pad(sizes[first] - common[first])
        repeated.append(best)
        begins.append(begin)
    runs, end = [], len(sizes)
    while end:
        runs.append(tuple(range(begins[end], end)))
        end = begins[end]
    return runs[::-1]


def differencing(costs: Sequence[float], num_bins: int) -> list[tuple[int, ...]]:
    """Deal items to bins of nearly equal cost (Karmarkar and Karp 1982, largest differencing).

    Each item starts as a deal of its own. The two deals of the largest spread are merged, the
    fullest bins of one onto the emptiest of the other, until one deal is left.
    """
    empty = ((),) * (num_bins - 1)
    rest = (0.0,) * (num_bins - 1)
    return _merge([_Deal((cost, *rest), ((item,), *empty)) for item, cost in enumerate(costs)])


def _packs(
    sizes: Sequence[int], costs: Sequence[float], num_packs: int, budget: int
) -> list[tuple[int, ...]]:
    """Return `num_packs` packs within the budget, or an empty list if none are found."""
    dealt = differencing(costs, num_packs)
    if all(sum(sizes[item] for item in bin_) <= budget for bin_ in dealt):
        return dealt
    # A small capacity keeps the packs even, so the capacities are tried in rising order.
    even = sum(sizes) / num_packs
    capacities = [max(max(sizes), int(even * slack) + 1) for slack in _SLACKS]
    for capacity in (*sorted({limit for limit in capacities if limit < budget}), budget):
        for fill in (_best_fit, _one_by_one):
            filled = fill(sizes, capacity)
            if len(filled) <= num_packs:
                return filled + [()] * (num_packs - len(filled))
    return []


def _best_fit(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Put each row, the longest first, into the fullest pack that has room for it."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = [number for number, room in enumerate(rooms) if room >= sizes[item]]
        if fitting:
            fullest = min(fitting, key=rooms.__getitem__)
            packs[fullest].append(item)
            rooms[fullest] -= sizes[item]
        else:
            packs.append([item])
            rooms.append(capacity - sizes[item])
    return [tuple(items) for items in packs]


def _one_by_one(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Fill packs one by one: the longest remaining row, then the rows that best fill the rest."""
    grain = -(-capacity // _GRAIN)
    remaining = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    packs = []
    while remaining:
        # Sizes round up and room rounds down, so that no pack exceeds the capacity.
        first, *others = remaining
        room = (capacity - sizes[first]) // grain
        chosen = _closest_sum([-(-sizes[item] // grain) for item in others], room)
        taken = (first, *(others[index] for index in chosen))
        packs.append(taken)
        remaining = [item for item in others if item not in set(taken)]
    return packs


def _closest_sum(sizes: Sequence[int], room: int) -> list[int]:
    """Return the indices whose sizes come closest to `room` from below; early ones are preferred.

    Bit n of `reached` is set if some of the sizes so far sum to n.
    """
    within = (1 << (room + 1)) - 1
    reached = [1]
    for size in sizes:
        # An exact fit cannot be improved.
        if reached[-1] >> room:
            break
        reached.append((reached[-1] | reached[-1] << size) & within)
    total = reached[-1].bit_length() - 1
    chosen = []
    # Walk back: if a sum could not be reached before a size, that size is part of it.
    for index in range(len(reached) - 2, -1, -1):
        if not reached[index] >> total & 1:
            chosen.append(index)
            total -= sizes[index]
    return chosen[::-1]


def _to_ranks(packs: list[tuple[int, ...]], costs: Sequence[float], num_ranks: int) -> Packs:
    """Give each rank one pack of every slot, so that the ranks' costs are similar."""
    pack_costs = [sum(costs[item] for item in items) for items in packs]
    order = sorted(range(len(packs)), key=lambda number: -pack_costs[number])
    slots = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    deals = [
        _Deal(tuple(pack_costs[number] for number in slot), tuple((number,) for number in slot))
        for slot in slots
    ]
    return tuple(
        tuple(packs[number] for number in sorted(rank, key=lambda number: -pack_costs[number]))
        for rank in _merge(deals)
    )


def _merge(deals: Sequence[_Deal]) -> list[tuple[int, ...]]:
    # The heap pops the largest spread first, and the number breaks ties.
    heap = [(-deal.spread, number, deal) for number, deal in enumerate(deals)]
    heapq.heapify(heap)
    for number in range(len(deals), 2 * len(deals) - 1):
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = _join(one, other)
        heapq.heappush(heap, (-joined.spread, number, joined))
    return list(heap[0][2].bins)


def _join(one: _Deal, other: _Deal) -> _Deal:
    """Put the fullest bins of one onto the emptiest of the other; the fullest come first."""
    pairs = zip(one.sums, one.bins, reversed(other.sums), reversed(other.bins), strict=True)
    bins = sorted(((a + b, items + more) for a, items, b, more in pairs), reverse=True)
    return _Deal(tuple(total for total, _ in bins), tuple(items for _, items in bins))
