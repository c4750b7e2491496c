"""The base of every policy-gradient algorithm: settings, advantages, the loss and its terms.

An algorithm adds its ratio, its clip and its mean. Axes: B rows, T positions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from swerl.core.episode import Group
from swerl.core.learning import LossInputs, LossResult

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


MAX_EXPONENT = 3.0
"""Largest exponent of a token: at e^3 = 20 one token of some thousands does not own their gradient.
Ratios of a healthy run stay within 1 +- 0.5."""
MAX_ROW_EXPONENT = 20.0
"""Largest exponent of a correction's ratio; its bounds act far below."""


def bounded(exponent_BT: torch.Tensor) -> torch.Tensor:
    """Return exponents of at most MAX_EXPONENT; the gradient passes beyond the bound, too."""
    return exponent_BT - (exponent_BT.detach() - MAX_EXPONENT).clamp(min=0)


def clipped(
    log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor, low: float, high: float
) -> Surrogate:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) per token.

    J. Schulman et al., "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), eq. 7.
    """
    import torch

    ratio_BT = bounded(log_ratio_BT).exp()
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
    exponent_BT = bounded(-gap_BT)
    return exponent_BT.expm1() - exponent_BT


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

    The ratio of a token is rho = trainer / engine, the trainer before the first update on the
    step's Samples.

    - Truncated importance sampling (`*-tis`): F. Yao et al., "Your Efficient RL Framework Secretly
      Brings You Off-Policy RL Training" (2025): min(rho, C) with C = 2.
    - Masked importance sampling (`*-mis`) and its geometric form: J. Liu, Y. Li et al., "When Speed
      Kills Stability" (2025), parts 2 and 3: rho if rho <= C, else 0; a whole row weighs 0 if the
      geometric mean of its ratios is out of bounds.
    - IcePop: Ling Team, "Every Step Evolves" (arXiv 2510.18855): rho if 0.5 <= rho <= 5, else 0.
    """
    import torch

    low, high = bounds
    log_ratio_BT = (_base_logp(inputs) - inputs.old_logp_BT) * inputs.mask_BT
    if rule in (Mismatch.SEQUENCE_TIS, Mismatch.SEQUENCE_MIS):
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    elif rule is Mismatch.GEOMETRIC_MIS:
        mean_B1 = row_means(log_ratio_BT, inputs.mask_BT).unsqueeze(1)
        log_ratio_BT = mean_B1.expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.clamp(max=MAX_ROW_EXPONENT).exp()
    is_cut_BT = (ratio_BT < low) | (ratio_BT > high)
    if rule in (Mismatch.TOKEN_TIS, Mismatch.SEQUENCE_TIS):
        return MismatchWeights(ratio_BT.clamp(low, high), is_cut_BT)
    kept_BT = torch.ones_like(ratio_BT) if rule is Mismatch.GEOMETRIC_MIS else ratio_BT
    return MismatchWeights(kept_BT.masked_fill(is_cut_BT, 0.0), is_cut_BT)


SIGNS = {"positive": operator.gt, "negative": operator.lt}
"""Names and tests of an advantage's sign."""
STD_FLOOR = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not blow up."""

if TYPE_CHECKING:
    Objective: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Surrogate]
    """(log-ratios, advantages) -> each token's part of the objective."""
    Mean: TypeAlias = Callable[[torch.Tensor, LossInputs], torch.Tensor]


class PolicyOptions(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the initial policy; above 0, a frozen copy is kept."""
    kl_place: Literal["loss", "reward"] = "loss"
    """`loss` differentiates the estimate. `reward` subtracts from each token's advantage the sum of
    the estimates from that token to the end of its row."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of a token's divergence; k3 is the choice of GRPO's paper."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; the papers that use it disagree, so it is off."""
    mismatch: Mismatch = Mismatch.NONE
    """Correction for the difference between the engine's and the trainer's probabilities."""
    mismatch_low: float | None = Field(None, ge=0)
    """Least ratio, trainer over engine; none uses the rule's default."""
    mismatch_high: float | None = Field(None, gt=0)
    """Largest ratio, trainer over engine; none uses the rule's default."""

    @field_validator("kl_estimator")
    @classmethod
    def _has_a_gradient(cls, value: str, info: ValidationInfo) -> str:
        if value == "k1" and info.data.get("kl_place") == "loss":
            raise ValueError("k1 in the loss has a mean gradient of zero; set kl_place to 'reward'")
        return value

    @field_validator("mismatch_low", "mismatch_high")
    @classmethod
    def _has_a_rule(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("mismatch") is Mismatch.NONE:
            raise ValueError("bounds without a rule do nothing; set mismatch too")
        return value

    @field_validator("mismatch_high")
    @classmethod
    def _is_above_the_low(cls, value: float | None, info: ValidationInfo) -> float | None:
        rule = info.data.get("mismatch", Mismatch.NONE)
        if rule is not Mismatch.NONE:
            low, high = MISMATCH_BOUNDS[rule]
            low = low if info.data.get("mismatch_low") is None else info.data["mismatch_low"]
            high = high if value is None else value
            if high <= low:
                raise ValueError(f"the upper bound {high:g} must be above the lower bound {low:g}")
        return value

    @property
    def mismatch_bounds(self) -> tuple[float, float]:
        """The least and the largest ratio that pass unchanged; the rule must not be `none`."""
        low, high = MISMATCH_BOUNDS[self.mismatch]
        return (
            low if self.mismatch_low is None else self.mismatch_low,
            high if self.mismatch_high is None else self.mismatch_high,
        )


class GroupOptions(PolicyOptions):
    normalize_std: bool = True
    """Divide advantages by the Group's standard deviation, as the paper does."""


OptionsT = TypeVar("OptionsT", bound=PolicyOptions)


class PolicyGradient(Generic[OptionsT]):
    """Base of the algorithms: implements Algorithm but for `loss`."""

    needs_context = False

    def __init__(self, options: OptionsT) -> None:
        self.options = options
        self.needs_reference = options.kl_coef > 0

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        """Return each reward less its Group's mean, over its deviation if the options ask for it.

        The source of each paper: GRPO section 4.1.2, GSPO eq. 6, DAPO eq. 9; Dr. GRPO section 3.2
        does not divide.
        """
        options = self.options
        normalize_std = isinstance(options, GroupOptions) and options.normalize_std
        return [group_advantages(group, normalize_std=normalize_std) for group in groups]


def group_advantages(group: Group, *, normalize_std: bool) -> list[float]:
    """Return each Episode's reward less the Group's mean, over the standard deviation if asked.

    Only learnable Episodes are compared: verdicts `infra` and `invalid` enter no mean and no
    deviation, and get 0. All get 0 if all rewards are equal or one learnable Episode is left. The
    number of Samples of an Episode changes nothing.
    """
    if not group.has_signal:
        return [0.0] * len(group.episodes)
    rewards = [episode.reward for episode in group.episodes if episode.learnable]
    mean = fmean(rewards)
    scale = stdev(rewards) + STD_FLOOR if normalize_std else 1.0
    return [
        (episode.reward - mean) / scale if episode.learnable else 0.0 for episode in group.episodes
    ]


def scale_over_step(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, centre: bool
) -> list[list[float]]:
    """Return advantages over their standard deviation in the whole step, centred first if asked.

    All are 0 if all are equal.
    """
    values = [
        value
        for group, row in zip(groups, advantages, strict=True)
        for episode, value in zip(group.episodes, row, strict=True)
        if episode.learnable
    ]
    if len(set(values)) < 2:
        return [[0.0] * len(group.episodes) for group in groups]
    mean = fmean(values) if centre else 0.0
    scale = stdev(values) + STD_FLOOR
    return [
        [
            (value - mean) / scale if episode.learnable else 0.0
            for episode, value in zip(group.episodes, row, strict=True)
        ]
        for group, row in zip(groups, advantages, strict=True)
    ]


def clipped_loss(
    inputs: LossInputs,
    options: PolicyOptions,
    *,
    low: float,
    high: float,
    mean: Mean = episode_mean,
) -> LossResult:
    """Return `policy_loss` of token ratios clipped to 1 - low … 1 + high."""

    def objective(log_ratio_BT: torch.Tensor, advantage_BT: torch.Tensor) -> Surrogate:
        return clipped(log_ratio_BT, advantage_BT, low, high)

    return policy_loss(inputs, options, objective, mean)


def policy_loss(
    inputs: LossInputs, options: PolicyOptions, objective: Objective, mean: Mean = episode_mean
) -> LossResult:
    """Return minus the objective, with mismatch correction, KL and entropy as the options ask.

    Statistics are means over Episodes, whatever the loss's own mean is.
    """
    has_rule = options.mismatch is not Mismatch.NONE
    # With a rule the difference to the engine is in the correction's weight alone (decoupled PPO:
    # J. Hilton et al., "Batch size-invariance for policy optimization", arXiv 2110.00641).
    start_logp_BT = _base_logp(inputs) if has_rule else inputs.old_logp_BT
    log_ratio_BT = (inputs.logp_BT - start_logp_BT) * inputs.mask_BT
    surrogate = objective(log_ratio_BT, _token_advantages(inputs, options))
    gain_BT = surrogate.gain_BT
    is_bounded_BT = log_ratio_BT > MAX_EXPONENT
    stats = {
        "ratio": _statistic(surrogate.ratio_BT, inputs),
        "clip_fraction": _statistic(surrogate.is_clipped_BT, inputs),
    }
    if has_rule:
        correction = mismatch_weights(inputs, options.mismatch, options.mismatch_bounds)
        gain_BT = gain_BT * correction.weight_BT
        stats["mismatch_weight"] = _statistic(correction.weight_BT, inputs)
        stats["mismatch_cut"] = _statistic(correction.is_cut_BT, inputs)
    stats |= _rows_by_sign(gain_BT, inputs)
    loss = -mean(gain_BT, inputs)
    stats["policy_loss"] = float(loss.detach())
    if inputs.ref_logp_BT is not None:
        kl_BT = kl_estimate(options.kl_estimator, inputs.logp_BT, inputs.ref_logp_BT)
        stats["kl"] = _statistic(kl_BT, inputs)
        is_bounded_BT |= inputs.ref_logp_BT - inputs.logp_BT > MAX_EXPONENT
        if options.kl_place == "loss":
            loss = loss + options.kl_coef * mean(kl_BT, inputs)
    if options.entropy_coef:
        loss = loss - options.entropy_coef * mean(_entropy(inputs, log_ratio_BT), inputs)
    stats["bounded_tokens"] = float((is_bounded_BT * inputs.mask_BT).sum())
    return LossResult(loss, stats)


def _base_logp(inputs: LossInputs) -> torch.Tensor:
    """Return the trainer's log-probabilities before the first update on the step's Samples."""
    return inputs.logp_BT.detach() if inputs.base_logp_BT is None else inputs.base_logp_BT


def _rows_by_sign(gain_BT: torch.Tensor, inputs: LossInputs) -> dict[str, float]:
    """Count trained rows by the sign of their advantage, and those whose gain has no gradient."""
    import torch

    if not gain_BT.requires_grad:
        return {}
    # The graph between log-probabilities and gains is elementwise, so this costs little.
    (grad_BT,) = torch.autograd.grad(gain_BT.sum(), inputs.logp_BT, retain_graph=True)
    is_dead_B = ((grad_BT * inputs.mask_BT) == 0).all(1)
    is_trained_B = inputs.mask_BT.any(1)
    counts = {}
    for sign, is_of_sign_B in SIGNS.items():
        chosen_B = is_trained_B & is_of_sign_B(inputs.advantage_B, 0)
        counts[f"num_rows_{sign}"] = float(chosen_B.sum())
        counts[f"num_dead_rows_{sign}"] = float((chosen_B & is_dead_B).sum())
    return counts


def _token_advantages(inputs: LossInputs, options: PolicyOptions) -> torch.Tensor:
    advantage_BT = inputs.advantage_B.unsqueeze(1).expand_as(inputs.logp_BT)
    if options.kl_place == "loss" or inputs.ref_logp_BT is None:
        return advantage_BT
    kl_BT = kl_estimate(options.kl_estimator, inputs.logp_BT.detach(), inputs.ref_logp_BT)
    return advantage_BT - options.kl_coef * sum_to_end(kl_BT, inputs.mask_BT)


def _entropy(inputs: LossInputs, log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """Return a term whose gradient is, on average, that of the policy's entropy at each token.

    grad H = -E[log p grad log p] (R. Williams and J. Peng, "Function Optimization Using
    Connectionist Reinforcement Learning Algorithms", 1991). The gradient of -log p itself is 0 on
    average.
    """
    surprise_BT = -inputs.logp_BT.detach() * bounded(log_ratio_BT.detach()).exp()
    return surprise_BT * inputs.logp_BT


def _statistic(values_BT: torch.Tensor, inputs: LossInputs) -> float:
    return float(episode_mean(values_BT.detach().to(inputs.logp_BT.dtype), inputs))
