"""Every policy loss and its gradient against the papers' formulas, written out in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from swerl.core.learning import Totals
from tests.unit.training.algorithms.conftest import NAMES, Arrays, make, slope

Gains = Callable[[Arrays, object], np.ndarray]


def _ppo(ratio: np.ndarray, advantage: np.ndarray, options) -> np.ndarray:
    bounded = np.minimum(np.maximum(ratio, 1 - options.clip_low), 1 + options.clip_high)
    return np.minimum(ratio * advantage, bounded * advantage)


def _token_gains(arrays: Arrays, options) -> np.ndarray:
    ratio = np.exp(arrays["logp"] - arrays["old_logp"])
    return _ppo(ratio, arrays["advantage"][:, None], options)


def _sequence_gains(arrays: Arrays, options) -> np.ndarray:
    gains = np.zeros_like(arrays["logp"])
    for row, mask in enumerate(arrays["mask"]):
        if mask.any():
            trained = mask > 0
            change = (arrays["logp"][row] - arrays["old_logp"][row])[trained]
            ratio = np.exp(change.sum() / trained.sum())
            gains[row] = _ppo(ratio, arrays["advantage"][row], options)
    return gains


def _episode_mean(values: np.ndarray, arrays: Arrays, options) -> float:
    rows = zip(values, arrays["mask"], arrays["weight"], strict=True)
    return sum(weight * row[mask > 0].mean() for row, mask, weight in rows if mask.any())


def _token_mean(values: np.ndarray, arrays: Arrays, options) -> float:
    return float(values[arrays["mask"] > 0].mean())


def _budget_mean(values: np.ndarray, arrays: Arrays, options) -> float:
    return float(values[arrays["mask"] > 0].sum()) / options.token_budget / 3


WRITTEN_OUT: Mapping[str, tuple[Gains, Callable[..., float]]] = {
    "gspo": (_sequence_gains, _episode_mean),
    "grpo": (_token_gains, _episode_mean),
    "dr-grpo": (_token_gains, _budget_mean),
    "dapo": (_token_gains, _token_mean),
    "reinforce-pp": (_token_gains, _episode_mean),
}


def written_out(name: str, arrays: Arrays, options) -> float:
    """Return the loss of an algorithm without correction, KL in the loss by k3."""
    gains, mean = WRITTEN_OUT[name]
    gap = arrays["ref_logp"] - arrays["logp"]
    kl = np.exp(gap) - 1 - gap
    return -mean(gains(arrays, options), arrays, options) + options.kl_coef * mean(
        kl, arrays, options
    )


CASES = [
    pytest.param(name, settings, id=f"{name} {kind}")
    for name in WRITTEN_OUT
    for kind, settings in {
        "default": {"kl_estimator": "k3"},
        "narrow": {"clip_low": 0.005, "clip_high": 0.008, "kl_coef": 0.5, "kl_estimator": "k3"},
    }.items()
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_loss_and_gradient_equal_the_written_out_formula(
    arrays, to_inputs, name: str, settings: dict[str, float]
) -> None:
    algorithm = make(name, **settings)
    inputs = to_inputs(arrays)
    result = algorithm.loss(inputs)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(
        written_out(name, arrays, algorithm.options), abs=1e-9
    )
    expected = slope(lambda moved: written_out(name, moved, algorithm.options), arrays)
    np.testing.assert_allclose(inputs.logp_BT.grad.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("bounds", [(0.0, 5.0), (0.995, 1.005)], ids=["default", "narrow"])
def test_cispo_equals_the_written_out_formula_and_its_weight_has_no_gradient(
    arrays, to_inputs, bounds: tuple[float, float]
) -> None:
    algorithm = make("cispo", ratio_low=bounds[0], ratio_high=bounds[1])
    inputs = to_inputs(arrays)
    result = algorithm.loss(inputs)
    result.loss.backward()
    weight = np.clip(np.exp(arrays["logp"] - arrays["old_logp"]), *bounds)
    pull = weight * arrays["advantage"][:, None] * arrays["mask"] / arrays["mask"].sum()
    assert result.loss.item() == pytest.approx(-(pull * arrays["logp"]).sum(), abs=1e-9)
    np.testing.assert_allclose(inputs.logp_BT.grad.numpy(), -pull, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gspo"])
@pytest.mark.parametrize("num_rows", [2, 5])
def test_an_episode_has_one_vote_however_many_samples_it_became(
    to_inputs, name: str, num_rows: int
) -> None:
    algorithm = make(name, kl_coef=0.1, entropy_coef=0.01, mismatch="icepop")
    whole = _gradient_of_two_episodes(algorithm, to_inputs, num_rows=1)
    parts = _gradient_of_two_episodes(algorithm, to_inputs, num_rows=num_rows)
    assert np.count_nonzero(whole) == 14
    np.testing.assert_allclose(parts, whole, atol=1e-12)


def _gradient_of_two_episodes(algorithm, to_inputs, *, num_rows: int) -> np.ndarray:
    """Return the gradient of 14 tokens: ten of one Episode in `num_rows` rows, four of another."""
    rng = np.random.default_rng(3)
    tokens = {key: -2 * rng.random(14) for key in ("logp", "old_logp", "ref_logp")}
    rows = [list(part) for part in np.array_split(np.arange(10), num_rows)] + [[10, 11, 12, 13]]
    arrays = {key: np.zeros((len(rows), 14)) for key in (*tokens, "mask")}
    for row, places in enumerate(rows):
        arrays["mask"][row, places] = 1
        for key, values in tokens.items():
            arrays[key][row, places] = values[places]
    arrays["token"] = np.ones_like(arrays["mask"])
    arrays["advantage"] = np.array([0.7] * num_rows + [-1.1])
    arrays["weight"] = np.array([len(places) / 20 for places in rows[:-1]] + [0.5])
    inputs = to_inputs(arrays, Totals(2, 14))
    algorithm.loss(inputs).loss.backward()
    return inputs.logp_BT.grad.numpy().sum(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_trains_nothing_has_no_loss_and_no_gradient(
    arrays, to_inputs, name: str
) -> None:
    arrays["mask"] = np.zeros_like(arrays["mask"])
    arrays["weight"] = np.full(len(arrays["weight"]), 1 / 6)
    algorithm = make(name, kl_coef=0.1, entropy_coef=0.01, mismatch="sequence-mis")
    inputs = to_inputs(arrays, Totals(3, 0))
    result = algorithm.loss(inputs)
    result.loss.backward()
    assert result.loss.item() == 0
    assert torch.count_nonzero(inputs.logp_BT.grad) == 0


@pytest.mark.parametrize("gap", [-1000.0, -100.0, -10.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("name", NAMES)
def test_one_token_does_not_own_a_step(to_inputs, name: str, gap: float) -> None:
    """One token of 4,096 is far from the engine, or from the reference: the rest still learns."""
    shape = (8, 512)
    rng = np.random.default_rng(2)
    logp = -3 * rng.random(shape)
    near = {key: logp + 0.05 * rng.standard_normal(shape) for key in ("old_logp", "ref_logp")}
    plain = {"mask": np.ones(shape), "token": np.ones(shape), "weight": np.full(8, 1 / 8)}
    for far in ("old_logp", "ref_logp"):
        for advantage in (1.0, -1.0, 0.0):
            arrays = {"logp": logp, **near, **plain}
            arrays["advantage"] = np.where(np.arange(8) % 2, 1.0, -1.0)
            arrays["advantage"][0] = advantage
            arrays[far] = arrays[far].copy()
            arrays[far][0, 7] = logp[0, 7] - gap
            options = {"kl_coef": 0.05 * (far == "ref_logp"), "entropy_coef": 0.001}
            wide = {"clip_low": 0.2, "clip_high": 0.2} if name == "gspo" else {}
            inputs = to_inputs(arrays, Totals(8, 4096))
            result = make(name, kl_estimator="k3", **options, **wide).loss(inputs)
            result.loss.backward()
            grad = inputs.logp_BT.grad
            assert torch.isfinite(result.loss)
            assert torch.isfinite(grad).all()
            assert all(np.isfinite(value) for value in result.stats.values())
            assert grad[0, 7].abs() <= 0.5 * grad.norm()
            is_bounded = (gap > 3) == (far == "old_logp")
            assert result.stats["bounded_tokens"] == is_bounded


def test_only_clipped_tokens_count_as_clipped(arrays, to_inputs) -> None:
    arrays["old_logp"] = arrays["logp"].copy()
    arrays["advantage"] = np.ones(len(arrays["weight"]))
    first = np.flatnonzero(arrays["mask"][0])
    arrays["old_logp"][0, first[0]] -= 1.0
    result = make("grpo").loss(to_inputs(arrays))
    expected = arrays["weight"][0] / len(first)
    assert result.stats["clip_fraction"] == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_without_kl_no_reference_is_asked_for(name: str) -> None:
    assert make(name, kl_coef=0.1).needs_reference
    assert not make(name, kl_coef=0).needs_reference
