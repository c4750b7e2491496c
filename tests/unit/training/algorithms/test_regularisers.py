"""KL and entropy: what their gradients are on average, over every token that could be sampled.

A batch with one row for each token of a small vocabulary, weighted by its probability, is an exact
expectation; automatic differentiation of the exact quantity is the reference.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swerl.core.learning import LossInputs, Totals
from tests.unit.training.algorithms.conftest import NAMES, make

NUM_TOKENS = 7


def _logits(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)


def _every_token(logits: torch.Tensor) -> LossInputs:
    """Return a row for each token that could be sampled, by its probability; no advantage."""
    logp = torch.log_softmax(logits, 0)
    ones = torch.ones(NUM_TOKENS, 1, dtype=torch.float64)
    return LossInputs(
        logp_BT=logp.unsqueeze(1),
        old_logp_BT=logp.detach().unsqueeze(1),
        ref_logp_BT=torch.log_softmax(_logits(1), 0).unsqueeze(1),
        mask_BT=ones,
        token_BT=ones,
        advantage_B=torch.zeros(NUM_TOKENS, dtype=torch.float64),
        weight_B=logp.detach().exp(),
        totals=Totals(1, 1),
    )


@pytest.mark.parametrize(
    ("place", "estimator"), [("loss", "k3"), ("reward", "k1"), ("reward", "k3")]
)
def test_the_reported_kl_is_the_divergence_on_average(place: str, estimator: str) -> None:
    logp, ref_logp = torch.log_softmax(_logits(0), 0), torch.log_softmax(_logits(1), 0)
    exact = float((logp.exp() * (logp - ref_logp)).sum())
    algorithm = make("grpo", kl_coef=0.1, kl_place=place, kl_estimator=estimator)
    stats = algorithm.loss(_every_token(_logits(0))).stats
    assert stats["kl"] == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", NAMES)
def test_in_the_reward_a_token_is_charged_for_the_kl_to_the_end_of_its_row(
    arrays, to_inputs, name: str, estimator: str
) -> None:
    """Equals the loss without KL, each token with an advantage of its own, written out."""
    arrays["old_logp"] = arrays["logp"].copy()
    settings = {"kl_coef": 0.2, "kl_place": "reward", "kl_estimator": estimator}
    inputs = to_inputs(arrays)
    make(name, **settings).loss(inputs).loss.backward()
    plain = to_inputs(arrays)
    make(name, kl_coef=0).loss(plain).loss.backward()
    gap = arrays["logp"] - arrays["ref_logp"]
    kl = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap}[estimator] * arrays["mask"]
    advantage = np.zeros_like(gap)
    for row, place in np.ndindex(gap.shape):
        advantage[row, place] = arrays["advantage"][row] - 0.2 * kl[row, place:].sum()
    expected = plain.logp_BT.grad.numpy() * advantage / arrays["advantage"][:, None]
    np.testing.assert_allclose(inputs.logp_BT.grad.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("name", ["gspo", "grpo", "reinforce-pp"])
def test_the_entropy_bonus_has_the_gradient_of_the_entropy(name: str) -> None:
    sampled = _logits(0).requires_grad_()
    make(name, kl_coef=0.0, entropy_coef=0.5).loss(_every_token(sampled)).loss.backward()
    logits = _logits(0).requires_grad_()
    logp = torch.log_softmax(logits, 0)
    (0.5 * (logp.exp() * logp).sum()).backward()
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) > 0.01
    torch.testing.assert_close(sampled.grad, logits.grad, atol=1e-9, rtol=0)
