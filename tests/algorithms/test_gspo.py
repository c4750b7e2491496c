"""GSPO against the paper's formulas written out in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swerl.algorithms import gspo


def _row_loss(arrays, row: int, options: gspo.Options) -> float:
    trained = arrays["mask"][row] > 0
    if not trained.any():
        # No token is sampled, so the ratio is 1 and the loss is minus the advantage.
        return -arrays["advantage"][row]
    change = arrays["logp"][row] - arrays["old_logp"][row]
    ratio = np.exp(change[trained].sum() / trained.sum())
    clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
    advantage = arrays["advantage"][row]
    loss = -min(ratio * advantage, clipped * advantage)
    gap = (arrays["ref_logp"][row] - arrays["logp"][row])[trained]
    return loss + options.kl_coef * np.mean(np.exp(gap) - 1 - gap)


def _loss(arrays, options: gspo.Options) -> float:
    rows = range(len(arrays["weight"]))
    return sum(arrays["weight"][row] * _row_loss(arrays, row, options) for row in rows)


@pytest.mark.parametrize(
    "options",
    [gspo.Options(), gspo.Options(clip_low=0.01, clip_high=0.02, kl_coef=0.5)],
    ids=["default", "wide"],
)
def test_loss_and_gradient_equal_the_written_out_formula(
    arrays, to_inputs, numeric_slope, options: gspo.Options
) -> None:
    inputs = to_inputs(arrays)
    result = gspo.build(options).loss(inputs)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(_loss(arrays, options), abs=1e-9)
    expected = numeric_slope(lambda moved: _loss(moved, options), arrays)
    assert inputs.logp_BT.grad is not None
    np.testing.assert_allclose(inputs.logp_BT.grad.numpy(), expected, atol=1e-6)


def test_clipped_rows_have_no_policy_gradient(arrays, to_inputs) -> None:
    arrays["logp"] = arrays["old_logp"] + 0.1 * arrays["token"]
    arrays["advantage"] = np.ones(len(arrays["weight"]))
    inputs = to_inputs(arrays)
    result = gspo.build(gspo.Options(kl_coef=0)).loss(inputs)
    result.loss.backward()
    assert inputs.logp_BT.grad is not None
    assert torch.count_nonzero(inputs.logp_BT.grad) == 0
    untrained = arrays["weight"][arrays["mask"].sum(1) == 0].sum()
    assert result.stats["clip_fraction"] == pytest.approx(1 - untrained)


def test_micro_batches_add_up_to_the_batch(arrays, to_inputs) -> None:
    algorithm = gspo.build(gspo.Options())
    whole = algorithm.loss(to_inputs(arrays))
    parts = [
        algorithm.loss(to_inputs({name: array[rows] for name, array in arrays.items()}))
        for rows in (slice(0, 2), slice(2, 6))
    ]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), abs=1e-12)
    for name, value in whole.stats.items():
        assert sum(part.stats[name] for part in parts) == pytest.approx(value, abs=1e-9)


def test_an_episode_has_one_vote_however_many_samples_it_became(arrays, to_inputs) -> None:
    same = {name: np.repeat(array[:1], 3, axis=0) for name, array in arrays.items()}
    one, three = ({**same, "weight": np.array(w)} for w in ([1.0, 0, 0], [0.2, 0.3, 0.5]))
    algorithm = gspo.build(gspo.Options())
    first, second = algorithm.loss(to_inputs(one)).loss, algorithm.loss(to_inputs(three)).loss
    assert first.item() == pytest.approx(second.item(), abs=1e-12)


def test_without_kl_no_reference_is_asked_for() -> None:
    assert gspo.build(gspo.Options()).needs_reference
    assert not gspo.build(gspo.Options(kl_coef=0)).needs_reference


def test_advantages_are_the_normalised_rewards(group) -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    found = gspo.build(gspo.Options()).advantages(group(*(("solved", r) for r in rewards)))
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    centred = gspo.build(gspo.Options(normalize_std=False))
    found = centred.advantages(group(*(("solved", r) for r in rewards)))
    np.testing.assert_allclose(found, rewards - rewards.mean(), atol=1e-12)


def test_lost_episodes_enter_neither_mean_nor_deviation(group) -> None:
    algorithm = gspo.build(gspo.Options())
    clean = algorithm.advantages(group(("solved", 1.0), ("unsolved", 0.0), ("timeout", 0.0)))
    mixed = algorithm.advantages(
        group(
            ("solved", 1.0), ("infra", 9.0), ("unsolved", 0.0), ("invalid", -9.0), ("timeout", 0.0)
        )
    )
    assert list(mixed) == [clean[0], 0.0, clean[1], 0.0, clean[2]]


@pytest.mark.parametrize(
    "outcomes",
    [
        [("solved", 0.1), ("solved", 0.1), ("solved", 0.1)],
        [("unsolved", 0.0), ("unsolved", 0.0)],
        [("solved", 1.0), ("infra", 0.0), ("infra", 0.0)],
        [("infra", 1.0), ("invalid", 0.0)],
        [("solved", 1.0)],
        [],
    ],
    ids=["all solved", "none solved", "one survivor", "no survivor", "alone", "empty"],
)
def test_a_group_that_cannot_compare_gives_zeros(group, outcomes) -> None:
    assert list(gspo.build(gspo.Options()).advantages(group(*outcomes))) == [0.0] * len(outcomes)
