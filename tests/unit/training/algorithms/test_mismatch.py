"""Corrections for engine and trainer being of two minds, against NumPy, for every algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swerl.core.errors import RecipeError
from swerl.recipe.check import check_clip, plugin_options
from swerl.recipe.load import load
from swerl.recipe.schema import PluginSection, Recipe
from tests.unit.training.algorithms.conftest import NAMES, make, slope

GPU_RECIPES = [
    path
    for path in sorted((Path(__file__).parents[4] / "recipes").glob("*.toml"))
    if load([path]).cluster.gpus_per_node
]


def _weights(rule: str, arrays, low: float, high: float) -> np.ndarray:
    """Return the weight of every trained token, written out."""
    found = np.zeros_like(arrays["logp"])
    for row, mask in enumerate(arrays["mask"]):
        places = np.flatnonzero(mask)
        rho = np.exp((arrays["logp"] - arrays["old_logp"])[row, places])
        if rule.startswith("sequence"):
            rho = np.full_like(rho, np.prod(rho))
        if rule.startswith("geometric") and len(rho):
            rho = np.full_like(rho, np.prod(rho) ** (1 / len(rho)))
        inside = (rho >= low) & (rho <= high)
        if rule.endswith("tis"):
            found[row, places] = np.clip(rho, low, high)
        elif rule.startswith("geometric"):
            found[row, places] = inside
        else:
            found[row, places] = np.where(inside, rho, 0.0)
    return found


DEFAULTS = {
    "token-tis": (0.0, 2.0),
    "sequence-tis": (0.0, 2.0),
    "token-mis": (0.0, 2.0),
    "sequence-mis": (0.0, 2.0),
    "geometric-mis": (0.999, 1.001),
    "icepop": (0.5, 5.0),
}


@pytest.fixture
def apart(arrays):
    """The random batch with an engine that is far off on some tokens, and nearly right on a row."""
    rng = np.random.default_rng(7)
    gap = 0.8 * rng.standard_normal(arrays["logp"].shape)
    gap[0] = 2e-4 * rng.standard_normal(gap.shape[1])
    arrays["old_logp"] = (arrays["logp"] + gap) * arrays["token"]
    return arrays


def _means(name: str, arrays) -> np.ndarray:
    """Return what each token's gain is multiplied by in the loss's mean."""
    if name in ("dapo", "cispo"):
        return arrays["mask"] / arrays["mask"].sum()
    if name == "dr-grpo":
        return arrays["mask"] / 1024 / 3
    rows = np.maximum(arrays["mask"].sum(1), 1)
    return arrays["mask"] * (arrays["weight"] / rows)[:, None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", DEFAULTS)
@pytest.mark.parametrize("bounds", [None, (0.7, 1.3)], ids=["own bounds", "set bounds"])
def test_each_token_pulls_by_its_weight_and_its_advantage(
    apart, to_inputs, name: str, rule: str, bounds: tuple[float, float] | None
) -> None:
    """One step a Batch: the ratio to the policy before the step is 1, so this is all there is."""
    low, high = bounds or DEFAULTS[rule]
    settings = {"mismatch_low": low, "mismatch_high": high} if bounds else {}
    inputs = to_inputs(apart)
    result = make(name, kl_coef=0, mismatch=rule, **settings).loss(inputs)
    result.loss.backward()
    weights = _weights(rule, apart, low, high)
    expected = -weights * apart["advantage"][:, None] * _means(name, apart)
    np.testing.assert_allclose(inputs.logp_BT.grad.numpy(), expected, atol=1e-9)
    assert np.any(weights[apart["mask"] > 0] == 0) or rule.endswith("tis")
    rows = apart["weight"] / np.maximum(apart["mask"].sum(1), 1)
    mean = (weights * apart["mask"] * rows[:, None]).sum()
    assert result.stats["mismatch_weight"] == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("rule", DEFAULTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "cispo"])
def test_a_later_update_is_clipped_by_how_far_the_policy_has_moved(
    apart, to_inputs, name: str, rule: str
) -> None:
    """Decoupled: the ratio is to the policy at the Batch's start, the weight its ratio to the
    engine."""
    start = {**apart, "logp": apart["logp"].copy()}
    weights = _weights(rule, start, *DEFAULTS[rule])
    rng = np.random.default_rng(5)
    apart["logp"] = start["logp"] + 0.3 * rng.standard_normal(start["logp"].shape)

    def loss(arrays) -> float:
        ratio = np.exp((arrays["logp"] - start["logp"]) * arrays["mask"])
        if name == "gspo":
            counts = np.maximum(arrays["mask"].sum(1), 1)
            ratio = np.exp(np.log(ratio).sum(1) / counts)[:, None] * np.ones_like(ratio)
        low, high = (algorithm.options.clip_low, algorithm.options.clip_high)
        advantage = arrays["advantage"][:, None]
        gain = np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
        return -float((gain * weights * _means(name, arrays)).sum())

    algorithm = make(name, kl_coef=0, mismatch=rule)
    inputs = replace(to_inputs(apart), base_logp_BT=torch.from_numpy(start["logp"]))
    result = algorithm.loss(inputs)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(loss(apart), abs=1e-9)
    # In the token form of a sequence ratio each token pulls with its own weight.
    if name != "gspo" or rule.startswith(("sequence", "geometric")):
        expected = slope(loss, apart)
        np.testing.assert_allclose(inputs.logp_BT.grad.numpy(), expected, atol=1e-6)
    assert 0 < result.stats["clip_fraction"] < 1


def test_a_share_of_tokens_out_of_bounds_is_reported(apart, to_inputs) -> None:
    result = make("grpo", mismatch="icepop").loss(to_inputs(apart))
    rho = np.exp(apart["logp"] - apart["old_logp"])
    outside = ((rho < 0.5) | (rho > 5)) * apart["mask"]
    rows = apart["weight"] / np.maximum(apart["mask"].sum(1), 1)
    expected = (outside * rows[:, None]).sum()
    assert expected > 0
    assert result.stats["mismatch_cut"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rule", DEFAULTS)
def test_a_hopeless_row_costs_its_own_gradient_and_no_other(arrays, to_inputs, rule: str) -> None:
    """A log-ratio of 1,000 leaves 64-bit floats too: the weight is a bound or 0, never NaN."""
    arrays["old_logp"][0] = (arrays["logp"][0] - 1000) * arrays["token"][0]
    arrays["old_logp"][5] = (arrays["logp"][5] + 1000) * arrays["token"][5]
    inputs = to_inputs(arrays)
    result = make("grpo", kl_coef=0, mismatch=rule).loss(inputs)
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert torch.isfinite(inputs.logp_BT.grad).all()
    assert torch.count_nonzero(inputs.logp_BT.grad[5]) == 0
    assert bool(torch.count_nonzero(inputs.logp_BT.grad[0])) == rule.endswith("tis")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"mismatch": "icepopp"}, "mismatch"),
        ({"mismatch_high": 2.0}, "set mismatch too"),
        ({"mismatch": "icepop", "mismatch_low": 6.0}, "must be above the lower bound 6"),
        ({"mismatch": "geometric-mis", "mismatch_high": 0.5}, "must be above the lower bound"),
        ({"kl_estimator": "k1"}, "set kl_place to 'reward'"),
        ({"kl_place": "rewards"}, "kl_place"),
        ({"clip_lo": 0.1}, "clip_low"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_a_remedy(settings, complaint: str) -> None:
    with pytest.raises(RecipeError) as error:
        plugin_options("algorithms", PluginSection(type="grpo", **settings), section="algorithm")
    assert complaint in f"{error.value} {error.value.hint}"


def _noisy(to_inputs, divergence: float):
    """Return rows of 4,000 tokens of both signs, whose engine is off by noise of this divergence.

    The engine samples. The trainer's log-probability is the engine's plus d, normal with variance
    2 KL and mean -KL, so that the trainer's probabilities still sum to one.
    """
    rng = np.random.default_rng(11)
    num_rows, length = 64, 4000
    ones = np.ones((num_rows, length))
    gap = rng.normal(-divergence, np.sqrt(2 * divergence), ones.shape)
    return to_inputs(
        {
            "logp": -0.5 * ones + gap,
            "old_logp": -0.5 * ones,
            "mask": ones,
            "token": ones,
            "advantage": np.where(np.arange(num_rows) % 2, 1.0, -1.0),
            "weight": np.full(num_rows, 1 / num_rows),
        }
    )


def _shares(inputs, result) -> dict[str, float]:
    """Return the share of rows with a gradient by sign: by the report, which must be true."""
    result.loss.backward()
    alive = inputs.logp_BT.grad.abs().sum(1).numpy() > 0
    found = {}
    for sign, rows in (
        ("positive", inputs.advantage_B.numpy() > 0),
        ("negative", inputs.advantage_B.numpy() < 0),
    ):
        dead = result.stats[f"num_dead_rows_{sign}"] / result.stats[f"num_rows_{sign}"]
        found[sign] = 1 - dead
        assert found[sign] == pytest.approx(alive[rows].mean())
    return found


@pytest.mark.parametrize("divergence", [1e-5, 6.4e-4, 1.5e-3])
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_rows_of_either_sign_learn_although_the_engine_is_off(
    to_inputs, path: Path, divergence: float
) -> None:
    """Published divergences between engine and trainer in bf16 are 6.4e-4 to 1.5e-3."""
    chosen = load([path]).algorithm
    inputs = _noisy(to_inputs, divergence)
    result = make(chosen.type, **{**chosen.options, "kl_coef": 0}).loss(inputs)
    assert min(_shares(inputs, result).values()) >= 0.95


@pytest.mark.parametrize(("divergence", "most"), [(6.4e-4, 0.4), (1.5e-3, 0.25)])
def test_gspo_without_a_rule_loses_the_negative_rows_and_reports_it(
    to_inputs, divergence: float, most: float
) -> None:
    inputs = _noisy(to_inputs, divergence)
    found = _shares(inputs, make("gspo", kl_coef=0).loss(inputs))
    assert found["positive"] > 0.9
    assert found["negative"] < most


def test_gspo_in_bf16_needs_a_rule_or_a_wide_clip() -> None:
    recipe = {"name": "r", "trainer": {"dtype": "bf16"}, "algorithm": {"type": "gspo"}}
    with pytest.raises(RecipeError, match="negative advantage would not learn"):
        check_clip(Recipe.model_validate(recipe))
    for options in ({"mismatch": "token-tis"}, {"clip_low": 0.01, "clip_high": 0.02}):
        check_clip(Recipe.model_validate(recipe | {"algorithm": {"type": "gspo", **options}}))
    check_clip(Recipe.model_validate(recipe | {"trainer": {"dtype": "fp32"}}))
