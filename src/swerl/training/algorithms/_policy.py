"""The loss of every policy-gradient algorithm; each brings its ratio, its clip and its mean.

Axes: B rows, T positions. Log-probabilities of sampled tokens are all that is read, never logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from swerl.core.learning import LossInputs, LossResult
from swerl.training.algorithms import _kl
from swerl.training.algorithms._mismatch import correct
from swerl.training.algorithms._options import Mismatch, PolicyOptions
from swerl.training.algorithms._reduce import episode_mean
from swerl.training.algorithms._surrogate import Surrogate

if TYPE_CHECKING:
    import torch

    Objective: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Surrogate]
    """(log-ratios, advantages) -> what each token contributes."""
    Mean: TypeAlias = Callable[[torch.Tensor, LossInputs], torch.Tensor]


def policy_loss(
    inputs: LossInputs, options: PolicyOptions, objective: Objective, mean: Mean = episode_mean
) -> LossResult:
    """Return minus the objective, with correction, KL and entropy as the options say.

    Figures are means over Episodes, whatever the loss's own mean is.
    """
    log_ratio_BT = (inputs.logp_BT - _old_logp(inputs, options)) * inputs.mask_BT
    found = objective(log_ratio_BT, _advantages(inputs, options))
    gain_BT = found.gain_BT
    stats = {
        "ratio": _figure(found.ratio_BT, inputs),
        "clip_fraction": _figure(found.is_clipped_BT, inputs),
    }
    if options.mismatch is not Mismatch.NONE:
        correction = correct(inputs, options)
        gain_BT = gain_BT * correction.weight_BT
        stats["mismatch_weight"] = _figure(correction.weight_BT, inputs)
        stats["mismatch_cut"] = _figure(correction.is_cut_BT, inputs)
    loss = -mean(gain_BT, inputs)
    stats["policy_loss"] = float(loss.detach())
    if inputs.ref_logp_BT is not None:
        kl_BT = _kl.estimate(options.kl_estimator, inputs.logp_BT, inputs.ref_logp_BT)
        stats["kl"] = _figure(kl_BT, inputs)
        if options.kl_place == "loss":
            loss = loss + options.kl_coef * mean(kl_BT, inputs)
    if options.entropy_coef:
        loss = loss - options.entropy_coef * mean(_entropy(inputs, log_ratio_BT), inputs)
    return LossResult(loss, stats)


def _old_logp(inputs: LossInputs, options: PolicyOptions) -> torch.Tensor:
    """Return what the ratio is measured against.

    With a correction that is the trainer's own policy before the step: a Batch is one step, so it
    is the policy in training, without gradient, and what the engine did otherwise stands in the
    correction's weight alone.
    """
    if options.mismatch is Mismatch.NONE:
        return inputs.old_logp_BT
    return inputs.logp_BT.detach()


def _advantages(inputs: LossInputs, options: PolicyOptions) -> torch.Tensor:
    advantage_BT = inputs.advantage_B.unsqueeze(1).expand_as(inputs.logp_BT)
    if options.kl_place == "loss" or inputs.ref_logp_BT is None:
        return advantage_BT
    kl_BT = _kl.estimate(options.kl_estimator, inputs.logp_BT.detach(), inputs.ref_logp_BT)
    return advantage_BT - options.kl_coef * _kl.to_go(kl_BT, inputs.mask_BT)


def _entropy(inputs: LossInputs, log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """Return a term whose gradient is, on average, that of the policy's entropy at each token.

    grad H = -E[log p grad log p] (R. Williams and J. Peng, "Function Optimization Using
    Connectionist Reinforcement Learning Algorithms", 1991). Differentiating -log p itself would
    give 0 on average.
    """
    surprise_BT = -inputs.logp_BT.detach() * log_ratio_BT.detach().exp()
    return surprise_BT * inputs.logp_BT


def _figure(values_BT: torch.Tensor, inputs: LossInputs) -> float:
    return float(episode_mean(values_BT.detach().to(inputs.logp_BT.dtype), inputs))
