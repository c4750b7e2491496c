"""GRPO against the paper's formula written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from swerl.algorithms import grpo


def _token_loss(arrays, place: tuple[int, int], options: grpo.Options) -> float:
    advantage = arrays["advantage"][place[0]]
    ratio = np.exp(arrays["logp"][place] - arrays["old_logp"][place])
    clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
    gap = arrays["ref_logp"][place] - arrays["logp"][place]
    return -min(ratio * advantage, clipped * advantage) + options.kl_coef * (np.exp(gap) - 1 - gap)


def _loss(arrays, options: grpo.Options) -> float:
    total = 0.0
    for row, weight in enumerate(arrays["weight"]):
        places = [(row, t) for t in np.flatnonzero(arrays["mask"][row])]
        losses = [_token_loss(arrays, place, options) for place in places]
        total += weight * float(np.mean(losses)) if losses else 0.0
    return total


@pytest.mark.parametrize(
    "options",
    [grpo.Options(), grpo.Options(clip_low=0.005, clip_high=0.008, kl_coef=0.5)],
    ids=["default", "narrow"],
)
def test_loss_and_gradient_equal_the_written_out_formula(
    arrays, to_inputs, numeric_slope, options: grpo.Options
) -> None:
    inputs = to_inputs(arrays)
    result = grpo.build(options).loss(inputs)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(_loss(arrays, options), abs=1e-9)
    expected = numeric_slope(lambda moved: _loss(moved, options), arrays)
    assert inputs.logp_BT.grad is not None
    np.testing.assert_allclose(inputs.logp_BT.grad.numpy(), expected, atol=1e-6)


def test_only_clipped_tokens_count_as_clipped(arrays, to_inputs) -> None:
    arrays["old_logp"] = arrays["logp"].copy()
    arrays["advantage"] = np.ones(len(arrays["weight"]))
    first = np.flatnonzero(arrays["mask"][0])
    arrays["old_logp"][0, first[0]] -= 1.0
    result = grpo.build(grpo.Options()).loss(to_inputs(arrays))
    expected = arrays["weight"][0] / len(first)
    assert result.stats["clip_fraction"] == pytest.approx(expected)


def test_advantages_leave_lost_episodes_out(group) -> None:
    found = grpo.build(grpo.Options()).advantages(
        group(("solved", 1.0), ("unsolved", 0.0), ("infra", 1.0))
    )
    expected = 0.5 / (np.std([1.0, 0.0], ddof=1) + 1e-6)
    np.testing.assert_allclose(found, [expected, -expected, 0.0], atol=1e-12)
