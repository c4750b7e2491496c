"""pass@1 and pass@k over Tasks, with 95 % confidence intervals; the Task is the unit of chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt

Z95 = 1.959963984540054
"""0.975 quantile of the standard normal distribution."""
RESAMPLES = 2000
"""Enough that the ends of an interval move by less than one point from seed to seed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A mean over Tasks."""

    mean: float
    low: float
    """Lower end of the 95 % confidence interval."""
    high: float
    method: str
    """`wilson` or `bootstrap`: how the interval was found."""
    num_tasks: int


def pass_at_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Return the chance that one of k attempts solves a Task, without bias.

    M. Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), eq. 1:
    1 - C(n - c, k) / C(n, k), for n >= k.
    """
    return 1.0 - comb(num_attempts - num_solved, k) / comb(num_attempts, k)


def rate(values: Sequence[float]) -> Rate:
    """Return the mean of one value in 0 … 1 a Task, with its interval.

    Where all values are 0 or 1, or all equal, it is Wilson's score interval for that many draws
    (E. Wilson, 1927); a bootstrap of equal values would have no width. Else it is a percentile
    bootstrap over Tasks, with a fixed seed. Without Tasks the interval is 0 … 1.
    """
    num_tasks = len(values)
    if not num_tasks:
        return Rate(0.0, 0.0, 1.0, "wilson", 0)
    mean = sum(values) / num_tasks
    if set(values) <= {0.0, 1.0} or len(set(values)) == 1:
        return Rate(mean, *_wilson(mean, num_tasks), "wilson", num_tasks)
    return Rate(mean, *_bootstrap(values), "bootstrap", num_tasks)


def _wilson(mean: float, count: int) -> tuple[float, float]:
    if mean in (0.0, 1.0):  # one end is exact, and rounding would move it
        other = Z95**2 / (count + Z95**2)
        return (0.0, other) if mean == 0.0 else (1.0 - other, 1.0)
    spread = Z95 * sqrt(mean * (1 - mean) / count + Z95**2 / (4 * count**2))
    middle, scale = mean + Z95**2 / (2 * count), 1 + Z95**2 / count
    return (middle - spread) / scale, (middle + spread) / scale


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    draws = random.Random(0)
    count = len(values)
    means = sorted(sum(draws.choices(values, k=count)) / count for _ in range(RESAMPLES))
    return means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]
