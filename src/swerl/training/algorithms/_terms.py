"""Terms of a policy-gradient loss: means over tokens, clipped ratio, KL, mismatch correction.

Axes: B rows, T positions. Log-probabilities of sampled tokens are read, never logits. Log-ratios
are new over old, and 0 on tokens that are not trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from swerl.core.learning import LossInputs

if TYPE_CHECKING:
    import torch

# Means. Each is a sum over rows, so the parts of micro-batches and ranks add up to the batch's
# mean. None of them changes when an Episode's tokens are spread over more rows.


def row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return `mean_B`, the mean over each row's masked positions; 0 for a row without any."""
    return (values_BT * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)


def episode_mean(values_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return the mean over each Episode's tokens, then over Episodes: one vote each.

    A row weighs its share of its Episode's tokens, so the rows' means add up to the Episode's.
    """
    return (inputs.weight_B * row_means(values_BT, inputs.mask_BT)).sum()


def token_mean(values_BT: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return the mean over all tokens of the batch: an Episode weighs by its tokens."""
    return (values_BT * inputs.mask_BT).sum() / max(inputs.totals.num_tokens, 1)


def budget_mean(values_BT: torch.Tensor, inputs: LossInputs, budget: int) -> torch.Tensor:
    """Return each Episode's sum over a fixed number of tokens, then the mean over Episodes."""
    return (values_BT * inputs.mask_BT).sum() / (max(inputs.totals.num_episodes, 1) * budget)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A token's part of the objective, and figures without gradient."""

    gain_BT: torch.Tensor
    """The objective, to maximise."""
    ratio_BT: torch.Tensor
    is_clipped_BT: torch.Tensor
    """1 if the clip removed the gradient, or a part of it."""


def clipped(
    log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor, low: float, high: float
) -> Surrogate:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) per token.

    J. Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7.
    """
    import torch

    ratio_BT = log_ratio_BT.exp()
    free_BT = ratio_BT * advantage_BT
    gain_BT = torch.minimum(free_BT, ratio_BT.clamp(1 - low, 1 + high) * advantage_BT)
    return Surrogate(gain_BT, ratio_BT.detach(), gain_BT < free_BT)


def sequence_log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return each row's mean log-ratio at every token, with the gradient of that token alone.

    The token form of the sequence ratio, GSPO (arXiv 2507.18071), section 4.3: value and gradient
    of a row's mean equal those of its one ratio, and each token can have its own weight.
    """
    mean_B1 = row_means(log_ratio_BT, mask_BT).unsqueeze(1).detach()
    return mean_B1 + log_ratio_BT - log_ratio_BT.detach()


def kl_estimate(name: str, logp_BT: torch.Tensor, ref_logp_BT: torch.Tensor) -> torch.Tensor:
    """Return the estimate `k1`, `k2` or `k3` of KL(policy || reference) per token.

    J. Schulman, "Approximating KL divergence" (2020), with d = log policy - log reference: k1 = d,
    k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss, k2 has the gradient of the divergence, k3 a
    first-order approximation of it, and k1 none on average. In the reward, k1 has it (K. Liu et
    al., "Rethinking KL Regularization in RLHF", arXiv 2510.01555).
    """
    gap_BT = logp_BT - ref_logp_BT
    if name == "k1":
        return gap_BT
    if name == "k2":
        return gap_BT.square() / 2
    return (-gap_BT).expm1() + gap_BT


def sum_to_end(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return, at each token, the sum over it and the trained tokens after it in its row.

    REINFORCE++ (arXiv 2501.03262), eq. 8: a token's advantage is r - beta * sum of KL from t to T.
    """
    return (values_BT * mask_BT).flip(1).cumsum(1).flip(1)


class Mismatch(StrEnum):
    """Correction for an engine whose probabilities differ from the trainer's."""

    NONE = "none"
    """No correction: the loss's own ratio is measured against the engine."""
    TOKEN_TIS = "token-tis"
    """Each token weighs its ratio, truncated."""
    SEQUENCE_TIS = "sequence-tis"
    """Each token weighs the product of its row's ratios, truncated."""
    TOKEN_MIS = "token-mis"
    """Each token weighs its ratio; a token out of bounds weighs 0."""
    SEQUENCE_MIS = "sequence-mis"
    """Each token weighs the product of its row's ratios; a row out of bounds weighs 0."""
    GEOMETRIC_MIS = "geometric-mis"
    """A row weighs 0 if the geometric mean of its ratios is out of bounds, else 1."""
    ICEPOP = "icepop"
    """Like `token-mis`, with bounds on both sides."""


MISMATCH_BOUNDS = {
    Mismatch.TOKEN_TIS: (0.0, 2.0),
    Mismatch.SEQUENCE_TIS: (0.0, 2.0),
    Mismatch.TOKEN_MIS: (0.0, 2.0),
    Mismatch.SEQUENCE_MIS: (0.0, 2.0),
    Mismatch.GEOMETRIC_MIS: (0.999, 1.001),
    Mismatch.ICEPOP: (0.5, 5.0),
}
"""Default bounds of each rule; `mismatch_weights` names their sources."""


@dataclass(frozen=True, slots=True)
class MismatchWeights:
    """The factor of each token's gain."""

    weight_BT: torch.Tensor
    is_cut_BT: torch.Tensor
    """1 if the ratio was out of bounds."""


def mismatch_weights(
    inputs: LossInputs, rule: Mismatch, bounds: tuple[float, float]
) -> MismatchWeights:
    """Return the weights of a rule other than `none`.

    The ratio of a token is rho = trainer / engine, both before the step, without gradient.

    - Truncated importance sampling (`*-tis`): F. Yao et al., "Your Efficient RL Framework Secretly
      Brings You Off-Policy RL Training" (2025): min(rho, C) with C = 2.
    - Masked importance sampling (`*-mis`) and its geometric form: J. Liu, Y. Li et al., "When Speed
      Kills Stability" (2025), parts 2 and 3: rho if rho <= C, else 0; a whole row weighs 0 if the
      geometric mean of its ratios is out of bounds.
    - IcePop: Ling Team, "Every Step Evolves" (arXiv 2510.18855): rho if 0.5 <= rho <= 5, else 0.
    """
    import torch

    low, high = bounds
    log_ratio_BT = (inputs.logp_BT.detach() - inputs.old_logp_BT) * inputs.mask_BT
    if rule in (Mismatch.SEQUENCE_TIS, Mismatch.SEQUENCE_MIS):
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    elif rule is Mismatch.GEOMETRIC_MIS:
        mean_B1 = row_means(log_ratio_BT, inputs.mask_BT).unsqueeze(1)
        log_ratio_BT = mean_B1.expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.exp()
    is_cut_BT = (ratio_BT < low) | (ratio_BT > high)
    if rule in (Mismatch.TOKEN_TIS, Mismatch.SEQUENCE_TIS):
        return MismatchWeights(ratio_BT.clamp(low, high), is_cut_BT)
    kept_BT = torch.ones_like(ratio_BT) if rule is Mismatch.GEOMETRIC_MIS else ratio_BT
    return MismatchWeights(kept_BT.masked_fill(is_cut_BT, 0.0), is_cut_BT)
