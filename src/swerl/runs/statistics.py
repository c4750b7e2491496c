"""Formulas over Tasks: intervals, pass@k, paired tests, noise.

A value is one Task's mean over its attempts, in 0 … 1, and a difference is that of two such values.
The Task is the unit of every interval, because attempts at one Task are alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean

Z95 = 1.959963984540054
"""0.975 quantile of the standard normal distribution."""
RESAMPLES = 2000
"""Bootstrap samples: the ends of an interval move by less than one point between seeds."""


@dataclass(frozen=True, slots=True)
class Rate:
    mean: float
    low: float
    """Lower end of the 95 % confidence interval; `high` is the upper end."""
    high: float
    method: str
    """`wilson`, `bootstrap` or `agresti-min`."""
    num_tasks: int


def pass_at_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k attempts solves a Task.

    M. Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), eq. 1:
    1 - C(n - c, k) / C(n, k), for n >= k.
    """
    return 1.0 - comb(num_attempts - num_solved, k) / comb(num_attempts, k)


def rate(values: Sequence[float]) -> Rate:
    """Return the mean over Tasks of one value in 0 … 1 each, with its interval.

    If all values are 0 or 1, or all equal, the interval is Wilson's score interval for that many
    draws (E. Wilson, 1927); a bootstrap of equal values would have no width. Otherwise it is a
    percentile bootstrap over Tasks, with a fixed seed. Without Tasks it is 0 … 1.
    """
    num_tasks = len(values)
    if not num_tasks:
        return Rate(0.0, 0.0, 1.0, "wilson", 0)
    mean = sum(values) / num_tasks
    if set(values) <= {0.0, 1.0} or len(set(values)) == 1:
        return Rate(mean, *_wilson(mean, num_tasks), "wilson", num_tasks)
    return Rate(mean, *_bootstrap(values), "bootstrap", num_tasks)


def difference(values: Sequence[float]) -> Rate:
    """Return the mean of paired differences in -1 … 1, with its interval.

    A percentile bootstrap over Tasks (B. Efron, 1979) with a fixed seed. If all are equal, that has
    no width, and the interval is Agresti's and Min's. Without Tasks it is -1 … 1.
    """
    if not values:
        return Rate(0.0, -1.0, 1.0, "agresti-min", 0)
    if len(set(values)) > 1:
        return Rate(fmean(values), *_bootstrap(values), "bootstrap", len(values))
    middle, error = adjusted_mean(values)
    ends = max(middle - Z95 * error, -1.0), min(middle + Z95 * error, 1.0)
    return Rate(fmean(values), *ends, "agresti-min", len(values))


def adjusted_mean(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences and its standard error, which is never 0.

    A. Agresti and Y. Min, "Simple improved confidence intervals for comparing matched proportions"
    (Statistics in Medicine 24, 2005): add 1/2 to each of the four cells. So there are two more
    Tasks, the sum stays, and the sum of squares grows by 1.
    """
    count, total = len(differences) + 2, sum(differences)
    squares = sum(value * value for value in differences) + 1
    return total / count, sqrt(squares - total * total / count) / count


def exact_p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact sign-flip test over paired differences.

    If both policies are alike, the two sides of a Task can be exchanged, so each of the 2^n choices
    of signs is as likely (E. Pitman, 1937). With one attempt a side this is McNemar's exact test
    (Q. McNemar, 1947), a binomial test on the Tasks that one side alone solved. Differences are
    counted in a common fraction, in 64ths if none is larger than a 64th.
    """
    off = [max((abs(v * g - round(v * g)) for v in differences), default=0) for g in range(1, 65)]
    grid = next((number for number, most in enumerate(off, 1) if most < 1e-9), 64)
    sizes = [size for value in differences if (size := round(abs(value) * grid))]
    observed = abs(sum(round(value * grid) for value in differences))
    # Coefficient j of the product of (1 + x^size) counts the choices with a positive sum of j. A
    # long integer holds the polynomial, with a digit a coefficient; no sum of digits overflows.
    digit, counts = len(sizes) + 1, 1
    for size in sizes:
        counts += counts << (size * digit)
    least = (sum(sizes) + observed) // 2
    tail = (counts >> (least * digit)) % ((1 << digit) - 1) if sizes else 1
    return min(1.0, 2 * tail / (1 << len(sizes)))


def noise_floor(tasks: Iterable[tuple[int, int]]) -> float | None:
    """Return the difference of two evaluations of one policy that chance exceeds once in 20 times.

    Takes (attempts, solved) of each Task. The variance of a mean that comes from sampling alone is
    the sum of s_i^2 / k_i over n^2 (E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640);
    s_i^2 = p (1 - p) k / (k - 1). None if no Task has two attempts. A Task with one takes the mean
    s^2 of the others.
    """
    counted = [(n, solved / n) for n, solved in tasks if n]
    variances = {i: p * (1 - p) * n / (n - 1) for i, (n, p) in enumerate(counted) if n > 1}
    if not variances:
        return None
    mean = fmean(variances.values())
    variance = (
        sum(variances.get(i, mean) / n for i, (n, _) in enumerate(counted)) / len(counted) ** 2
    )
    return Z95 * sqrt(2 * variance)


def _wilson(mean: float, count: int) -> tuple[float, float]:
    if mean in (0.0, 1.0):  # one end is exact; rounding would move it
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
