"""Several optimizer steps on one Batch: it is split by whole Groups, and what they report joined.

Log-probabilities of the policy that sampled stay as they were recorded, so from the second step on
the ratio is not 1 and an algorithm's clip acts (PPO, arXiv 1707.06347, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swerl.core.learning import Batch, StepStats


def split(batch: Batch, count: int) -> list[Batch]:
    """Return at most `count` Batches with like numbers of Groups; a Group is never split.

    Each is normalised by its own Episodes, so one vote an Episode holds within each.
    """
    tasks = list(dict.fromkeys(sample.task for sample in batch.samples))
    count = min(count, len(tasks))
    if count <= 1:
        return [batch]
    place = {task: index * count // len(tasks) for index, task in enumerate(tasks)}
    parts = []
    for number in range(count):
        samples = tuple(sample for sample in batch.samples if place[sample.task] == number)
        parts.append(Batch(batch.step, samples, len({sample.episode for sample in samples})))
    return parts


@dataclass(frozen=True, slots=True)
class Learned:
    """What the optimizer steps on a Batch came to."""

    stats: StepStats | None
    """None where all were skipped."""
    skipped: frozenset[str] = frozenset()
    """Tasks whose step was skipped."""


def learned(parts: Sequence[Batch], taken: Sequence[StepStats | None]) -> Learned:
    """Join the steps on the parts of a Batch; one that was skipped has no report."""
    pairs = list(zip(parts, taken, strict=True))
    return Learned(
        join([stats for stats in taken if stats]),
        frozenset(sample.task for part, stats in pairs if not stats for sample in part.samples),
    )


def join(stats: Sequence[StepStats]) -> StepStats | None:
    """Return one report of several steps, None of none.

    Seconds are added up, peaks are the largest, the learning rate is the last one; everything else
    is a mean weighted by trained tokens.
    """
    if len(stats) <= 1:
        return stats[0] if stats else None
    num_tokens = sum(each.num_tokens for each in stats)

    def mean(values: Sequence[float]) -> float:
        weighted = zip(values, stats, strict=True)
        return sum(value * each.num_tokens for value, each in weighted) / max(num_tokens, 1)

    def joined(name: str) -> float:
        values = [each.extra.get(name, 0.0) for each in stats]
        if name == "lr":
            return values[-1]
        if "max" in name or "peak" in name:
            return max(values)
        is_duration = name.endswith("_s") and not name.endswith("_per_s")
        return sum(values) if is_duration else mean(values)

    return StepStats(
        loss=mean([each.loss for each in stats]),
        grad_norm=mean([each.grad_norm for each in stats]),
        num_tokens=num_tokens,
        mismatch=mean([each.mismatch for each in stats]),
        duration_s=sum(each.duration_s for each in stats),
        extra={name: joined(name) for name in dict.fromkeys(n for e in stats for n in e.extra)},
    )
