from __future__ import annotations

from itertools import combinations

import pytest

from swerl.training.evaluation import pass_at_k, rate


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


def test_where_all_tasks_are_alike_the_interval_keeps_a_width() -> None:
    assert rate([0.0] * 20).high == pytest.approx(0.1611, abs=1e-4)
    assert rate([1.0] * 20).low == pytest.approx(1 - 0.1611, abs=1e-4)
    assert rate([0.5] * 20).method == "wilson"
    assert (rate([]).low, rate([]).high) == (0.0, 1.0)


def test_the_bootstrap_over_tasks_agrees_with_the_normal_approximation() -> None:
    values = [index % 5 / 4 for index in range(400)]
    found = rate(values)
    deviation = (sum((value - 0.5) ** 2 for value in values) / 400) ** 0.5
    assert found.method == "bootstrap"
    assert found.low == pytest.approx(0.5 - 1.96 * deviation / 20, abs=0.005)
    assert found.high == pytest.approx(0.5 + 1.96 * deviation / 20, abs=0.005)
    assert rate(values) == found
