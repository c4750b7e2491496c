"""Measure one optimizer step: sums over micro-batches and ranks, phase times, peak memory."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from swerl.core.learning import StepStats
from swerl.training.rank.microbatch import MicroBatch, WeightedSample

Item = TypeVar("Item")


_GIB = 2**30
LEAST_GAP = 1e-6
"""A row's smaller mean difference counts as this one: it is rounding."""


def compare(logp_BT: torch.Tensor, micro: MicroBatch) -> dict[str, float]:
    """Return the difference between the trainer's and the engine's log-probabilities.

    These are sums and a maximum; `log_gap` is the decimal logarithm of a row's mean. Minus the
    engine's own sum estimates the entropy of the policy that sampled.
    """
    compared_BT = micro.mask_BT * micro.sampled_B.unsqueeze(1)
    gap_BT = (logp_BT - micro.old_logp_BT).abs() * compared_BT
    is_compared_B = compared_BT.any(1)
    row_gap_B = (gap_BT.sum(1) / compared_BT.sum(1).clamp(min=1))[is_compared_B]
    log_gap_B = row_gap_B.clamp(min=LEAST_GAP).log10()
    return {
        "num_compared_rows": float(is_compared_B.sum()),
        "log_gap_sum": float(log_gap_B.sum()),
        "log_gap_square_sum": float(log_gap_B.square().sum()),
        "num_tokens": float(micro.mask_BT.sum()),
        "num_compared": float(compared_BT.sum()),
        "mismatch_sum": float(gap_BT.sum()),
        "surprise_sum": -float((micro.old_logp_BT * compared_BT).sum()),
        "mismatch_max": float(gap_BT.max()),
    }


def sum_over_ranks(
    results: Sequence[Mapping[str, float]], group: torch.distributed.ProcessGroup
) -> dict[str, float]:
    """Sum the figures of all micro-batches of a group's ranks; all ranks get the result."""
    everything = gather_lists(results, group)
    total: Counter[str] = Counter()
    for figures in everything:
        total.update(figures)
    # The counter has added up the maxima, too.
    peak = max(figures["mismatch_max"] for figures in everything)
    return {**total, "mismatch_max": peak}


def gather_lists(own: Sequence[Item], group: torch.distributed.ProcessGroup) -> list[Item]:
    """Return all ranks' lists, concatenated in the order of the ranks."""
    gathered: list[Sequence[Item]] = [[] for _ in range(group.size())]
    torch.distributed.all_gather_object(gathered, own, group=group)
    return [item for part in gathered for item in part]


def gather_logprobs(
    packed: Sequence[Sequence[WeightedSample]],
    trained: Sequence[Sequence[torch.Tensor]],
    group: torch.distributed.ProcessGroup,
) -> list[array[float]]:
    """Return the log-probabilities of each Sample's trained tokens on rank 0, in Batch order.

    `trained` are those of this rank's micro-batches; they are empty on ranks that report nothing.
    """
    own = [
        (row.index, array("f", values_T.numpy().tobytes()))
        for rows, values in zip(packed, trained, strict=bool(trained))
        for row, values_T in zip(rows, values, strict=True)
        # Rows of weight 0 only keep a rank busy; they are not in the batch.
        if row.weight
    ]
    gathered: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    torch.distributed.gather_object(own, gathered, dst=0, group=group)
    return [values for _, values in sorted(chain.from_iterable(gathered or ()))]


def to_stats(
    figures: dict[str, float],
    grad_norm: float,
    laps: Mapping[str, float],
    lr: float,
    *,
    logprobs: Sequence[Sequence[float]] = (),
) -> StepStats:
    """Turn a step's sums into means; `laps` are the seconds of its phases."""
    num_tokens = int(figures.pop("num_tokens"))
    duration_s = sum(laps.values())
    num_compared = max(figures.pop("num_compared"), 1.0)
    for sign in ("positive", "negative"):
        num_rows = figures.pop(f"num_rows_{sign}", 0.0)
        num_dead = figures.pop(f"num_dead_rows_{sign}", 0.0)
        # A step without a row of this sign has no share.
        if num_rows:
            figures[f"rows_without_gradient_{sign}"] = num_dead / num_rows
    mismatch = figures.pop("mismatch_sum") / num_compared
    entropy = figures.pop("surprise_sum") / num_compared
    num_rows = max(figures.pop("num_compared_rows"), 1.0)
    log_gap = figures.pop("log_gap_sum") / num_rows
    variance = figures.pop("log_gap_square_sum") / num_rows - log_gap**2
    return StepStats(
        loss=figures.pop("loss"),
        grad_norm=grad_norm,
        num_tokens=num_tokens,
        mismatch=mismatch,
        duration_s=duration_s,
        extra={
            **figures,
            **laps,
            "entropy": entropy,
            # Rows of one engine are alike: a large deviation means that only some rows are off.
            "mismatch_spread": math.sqrt(max(variance, 0.0)),
            "lr": lr,
            "trained_tokens_per_s": num_tokens / duration_s,
        },
        logprobs=logprobs,
    )


class PhaseTimer:
    """Measure one phase after the other; memory only on CUDA."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        """Seconds by phase; names end in `_s`."""
        self.peak_bytes: dict[str, int] = {}
        """Peak memory of tensors, by phase."""
        self._last = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def lap(self, phase: str) -> None:
        if torch.cuda.is_available():
            # CUDA works asynchronously: without this, the time would count for a later phase.
            torch.cuda.synchronize()
            self.peak_bytes[phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.laps[f"{phase}_s"], self._last = now - self._last, now


def peak_memory(
    peak_bytes: Mapping[str, int], group: torch.distributed.ProcessGroup
) -> dict[str, float]:
    """Return the fullest rank's peak in GiB, by phase and overall; nothing on CPU."""
    if not torch.cuda.is_available():
        return {}
    peaks: dict[str, float] = {}
    for phase, size in gather_lists(list(peak_bytes.items()), group):
        for name in ("peak_memory_gib", f"{phase}_peak_memory_gib"):
            peaks[name] = max(peaks.get(name, 0.0), size / _GIB)
    return peaks
