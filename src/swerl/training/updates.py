"""Take optimizer steps on one Batch: split it by Groups, skip bad steps, join the reports.

Every step's ratio is measured against the policy before the first step on the Batch. It is 1 in the
first step; from the second one on an algorithm's clip acts (PPO, arXiv 1707.06347, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swerl.core.contracts import Trainer
from swerl.core.errors import NotFiniteError
from swerl.core.events import Emit, StepSkipped
from swerl.core.learning import Batch, StepStats

MAX_SKIPPED = 3
"""Consecutive steps that may be skipped: one can be an outlier, several mean divergence."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    stats: StepStats | None
    """None if every step was skipped."""
    skipped: frozenset[str] = frozenset()
    """Tasks whose step was skipped."""
    logprobs: Sequence[tuple[str, Sequence[float]]] = ()
    """Episode and trainer's log-probabilities of each Sample that was trained."""


class SkipCounter:
    """Skip and count steps whose loss or gradients are not finite; too many in a row raise."""

    def __init__(self, *, total: int = 0, in_a_row: int = 0) -> None:
        self.total = total
        self.in_a_row = in_a_row

    async def step(
        self, trainer: Trainer, batch: Batch, path: Path, emit: Emit
    ) -> StepStats | None:
        """Take an optimizer step on a Batch, which is stored at `path`; return None if skipped.

        A Batch without a trained token is skipped, too. Raises NotFiniteError once more than
        MAX_SKIPPED steps in a row were skipped.
        """
        hint = f"look at {path}; lower trainer.lr, or start again from an older checkpoint"
        try:
            if not batch.samples:
                hint = "`swerl why` and episodes/ show how the agents ended"
                raise NotFiniteError(f"no episode of step {batch.step} has a token to train")
            stats = await trainer.step(batch)
        except NotFiniteError as error:
            self.total += 1
            self.in_a_row += 1
            emit(StepSkipped(batch.step, str(error), str(path)))
            if self.in_a_row > MAX_SKIPPED:
                message = f"{self.in_a_row} steps in a row were skipped; the last one: {error}"
                raise NotFiniteError(message, hint=hint) from error
            return None
        self.in_a_row = 0
        return stats


def split(batch: Batch, count: int) -> list[Batch]:
    """Return at most `count` Batches with similar numbers of Groups; a Group is never split.

    Each is normalised by its own Episodes, so an Episode has one vote in its part.
    """
    tasks = list(dict.fromkeys(sample.task for sample in batch.samples))
    count = min(count, len(tasks))
    if count <= 1:
        return [batch]
    # Neighbouring Groups get the same part, and the parts differ by one Group at most.
    part_of = {task: index * count // len(tasks) for index, task in enumerate(tasks)}
    parts = []
    for number in range(count):
        samples = tuple(sample for sample in batch.samples if part_of[sample.task] == number)
        parts.append(Batch(batch.step, samples, len({sample.episode for sample in samples})))
    return parts


async def with_base(trainer: Trainer, parts: Sequence[Batch]) -> list[Batch]:
    """Return the parts with their log-probabilities under the current weights.

    The first part's own step computes them.
    """
    rest = [replace(part, base=await trainer.logprobs(part)) for part in parts[1:]]
    return [*parts[:1], *rest]


def join_updates(parts: Sequence[Batch], stats: Sequence[StepStats | None]) -> UpdateResult:
    """Join the reports of the steps on a Batch's parts; a skipped step has no report."""
    pairs = list(zip(parts, stats, strict=True))
    return UpdateResult(
        join_stats([report for report in stats if report]),
        frozenset(sample.task for part, report in pairs if not report for sample in part.samples),
        [
            (sample.episode, row)
            for part, report in pairs
            if report and report.logprobs
            for sample, row in zip(part.samples, report.logprobs, strict=True)
        ],
    )


def join_stats(stats: Sequence[StepStats]) -> StepStats | None:
    """Return one report of several steps, or None for no step.

    Durations and counts of tokens add up, peaks are the largest, the learning rate is the last one.
    Everything else is a mean, weighted by trained tokens, over the steps that report it.
    """
    if len(stats) <= 1:
        return stats[0] if stats else None
    num_tokens = sum(report.num_tokens for report in stats)

    def mean(values: Sequence[tuple[float, StepStats]]) -> float:
        weight = sum(report.num_tokens for _, report in values)
        return sum(value * report.num_tokens for value, report in values) / max(weight, 1)

    def joined(name: str) -> float:
        reported = [(report.extra[name], report) for report in stats if name in report.extra]
        values = [value for value, _ in reported]
        if name == "lr":
            return values[-1]
        if "max" in name or "peak" in name:
            return max(values)
        # The name of a rate, such as tokens per second, ends in `_s` too.
        is_duration = name.endswith("_s") and not name.endswith("_per_s")
        is_sum = is_duration or name.startswith("executed_") or name.endswith("_tokens")
        return sum(values) if is_sum else mean(reported)

    return StepStats(
        loss=mean([(report.loss, report) for report in stats]),
        grad_norm=mean([(report.grad_norm, report) for report in stats]),
        num_tokens=num_tokens,
        mismatch=mean([(report.mismatch, report) for report in stats]),
        duration_s=sum(report.duration_s for report in stats),
        extra={name: joined(name) for name in dict.fromkeys(n for e in stats for n in e.extra)},
    )
