"""Formulas agree with SciPy or a count of all cases."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from swerl.runs.statistics import (
    adjusted_mean,
    difference,
    exact_p_value,
    noise_floor,
    pass_at_k,
    rate,
)


@pytest.mark.parametrize("num_solved", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_attempts(num_solved: int, k: int) -> None:
    attempts = [True] * num_solved + [False] * (5 - num_solved)
    choices = list(combinations(attempts, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at_k(5, num_solved, k) == pytest.approx(expected, abs=1e-12)


def test_the_interval_of_single_attempts_is_wilsons() -> None:
    found = rate([1.0] * 8 + [0.0] * 2)
    assert (found.method, found.num_tasks, found.mean) == ("wilson", 10, 0.8)
    # Written out from the formula: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).
    assert (found.low, found.high) == (
        pytest.approx(0.4902, abs=1e-4),
        pytest.approx(0.9433, abs=1e-4),
    )


def test_if_all_tasks_are_alike_the_interval_keeps_a_width() -> None:
    assert rate([0.0] * 20).high == pytest.approx(0.1611, abs=1e-4)
    assert rate([1.0] * 20).low == pytest.approx(1 - 0.1611, abs=1e-4)
    assert rate([0.5] * 20).method == "wilson"
    assert (rate([]).low, rate([]).high) == (0.0, 1.0)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 5), (3, 9), (10, 10), (40, 61)])
def test_with_one_attempt_the_p_value_is_mcnemars_exact_one(lost: int, won: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    found = exact_p_value([1.0] * won + [-1.0] * lost + [0.0] * 30)
    expected = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("grid", [3, 4, 60])
def test_with_more_attempts_every_choice_of_signs_counts(grid: int) -> None:
    draws = random.Random(grid)
    values = [draws.randint(-grid, grid) / grid for _ in range(10)]
    found = exact_p_value(values)
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in product((1, -1), repeat=10)]  # fmt: skip
    assert found == pytest.approx(sum(each >= abs(sum(values)) - 1e-9 for each in sums) / 1024)
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    tested = stats.permutation_test(
        (values,), lambda x: sum(x), permutation_type="samples", n_resamples=2000
    )
    assert found == pytest.approx(tested.pvalue)


def test_the_interval_of_a_difference_is_scipys_bootstrap() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    draws = random.Random(2)
    values = [draws.randint(-2, 3) / 4 for _ in range(200)]
    found = difference(values)
    theirs = stats.bootstrap(
        (values,), lambda x, axis: x.mean(axis=axis), n_resamples=2000, method="percentile", rng=0
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_equal_differences_keep_an_interval() -> None:
    found = difference([0.0] * 50)
    # Agresti and Min: sqrt(b + c + 1) / (n + 2) with b = c = 0.
    assert (found.mean, found.method) == (0.0, "agresti-min")
    assert found.high == pytest.approx(1.96 / 52, abs=1e-4) == -found.low
    assert (difference([]).low, difference([]).high) == (-1.0, 1.0)


def test_the_adjusted_mean_is_agrestis_and_mins() -> None:
    won, lost, alike = 12, 5, 33
    middle, error = adjusted_mean([1.0] * won + [-1.0] * lost + [0.0] * alike)
    count = won + lost + alike
    assert middle == pytest.approx((won - lost) / (count + 2))
    squares = won + lost + 1 - (won - lost) ** 2 / (count + 2)
    assert error == pytest.approx(squares**0.5 / (count + 2))


def test_the_noise_floor_is_what_two_evaluations_of_one_policy_differ_by() -> None:
    draws = random.Random(3)
    chances = [draws.betavariate(0.25, 0.34) for _ in range(300)]

    def evaluate() -> list[tuple[int, int]]:
        return [(4, sum(draws.random() < chance for _ in range(4))) for chance in chances]

    means = [sum(solved for _, solved in evaluate()) / 1200 for _ in range(400)]
    pairs = sorted(abs(a - b) for a, b in zip(means[::2], means[1::2], strict=True))
    assert noise_floor(evaluate()) == pytest.approx(pairs[190], rel=0.2)
    assert noise_floor([(1, 1), (1, 0)]) is None
    assert noise_floor([]) is None
