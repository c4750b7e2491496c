"""What a step reports: sums over micro-batches and ranks, and the means drawn from them."""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state

from swerl.learning import StepStats
from swerl.training.microbatch import MicroBatch


def compare(logp_BT: torch.Tensor, micro: MicroBatch) -> dict[str, float]:
    """Return how far the trainer's log-probabilities are from the engine's, as sums and a peak.

    The engine's own sum estimates the entropy of the policy that sampled.
    """
    compared_BT = micro.mask_BT * micro.sampled_B.unsqueeze(1)
    gap_BT = (logp_BT - micro.old_logp_BT).abs() * compared_BT
    return {
        "num_tokens": float(micro.mask_BT.sum()),
        "num_compared": float(compared_BT.sum()),
        "mismatch_sum": float(gap_BT.sum()),
        "surprise_sum": -float((micro.old_logp_BT * compared_BT).sum()),
        "mismatch_max": float(gap_BT.max()),
    }


def sum_over_ranks(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the figures of all micro-batches of all ranks; every rank gets the same."""
    group = parallel_state.get_data_parallel_group_gloo()
    gathered: list[Sequence[Mapping[str, float]]] = [[] for _ in range(group.size())]
    torch.distributed.all_gather_object(gathered, results, group=group)
    everything = [figures for part in gathered for figures in part]
    total: Counter[str] = Counter()
    for figures in everything:
        total.update(figures)
    peak = max(figures["mismatch_max"] for figures in everything)
    return {**total, "mismatch_max": peak}


def to_stats(
    figures: dict[str, float], grad_norm: float, laps: Mapping[str, float], lr: float
) -> StepStats:
    """Draw the means from a step's figures; `laps` are the seconds of its phases."""
    num_tokens = int(figures.pop("num_tokens"))
    duration_s = sum(laps.values())
    num_compared = max(figures.pop("num_compared"), 1.0)
    mismatch = figures.pop("mismatch_sum") / num_compared
    entropy = figures.pop("surprise_sum") / num_compared
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
            "lr": lr,
            "trained_tokens_per_s": num_tokens / duration_s,
        },
    )
