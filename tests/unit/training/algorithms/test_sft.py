"""SFT against the weighted cross-entropy written out in NumPy."""

from __future__ import annotations

import pytest

from swerl.training.algorithms import sft


def _loss(arrays, context_weight: float) -> float:
    total = 0.0
    for row, weight in enumerate(arrays["weight"]):
        trained = arrays["mask"][row]
        weights = trained + context_weight * (arrays["token"][row] - trained)
        if weights.sum():
            total -= weight * (weights * arrays["logp"][row]).sum() / weights.sum()
    return total


@pytest.mark.parametrize("context_weight", [0.0, 0.1, 1.0])
def test_loss_equals_the_written_out_formula(arrays, to_inputs, context_weight: float) -> None:
    result = sft.build(sft.Options(context_weight=context_weight)).loss(to_inputs(arrays))
    assert result.loss.item() == pytest.approx(_loss(arrays, context_weight), abs=1e-9)
    assert result.stats["nll"] == pytest.approx(_loss(arrays, 0.0), abs=1e-6)


def test_context_is_requested_only_if_it_has_weight(group) -> None:
    assert sft.build(sft.Options(context_weight=0.1)).needs_context
    replies_only = sft.build(sft.Options())
    assert not replies_only.needs_context
    assert replies_only.advantages([group(("solved", 1.0), ("unsolved", 0.0))]) == [[0.0, 0.0]]
