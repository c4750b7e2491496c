"""Settings that every policy-gradient algorithm has."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Mismatch(StrEnum):
    """What is done about the difference between the engine's and the trainer's probabilities."""

    NONE = "none"
    """Nothing apart: the loss's own ratio is measured against the engine."""
    TOKEN_TIS = "token-tis"
    """Each token weighs its ratio, truncated."""
    SEQUENCE_TIS = "sequence-tis"
    """Each token weighs the product of its row's ratios, truncated."""
    TOKEN_MIS = "token-mis"
    """Each token weighs its ratio; one out of bounds weighs nothing."""
    SEQUENCE_MIS = "sequence-mis"
    """Each token weighs the product of its row's ratios; a row out of bounds weighs nothing."""
    GEOMETRIC_MIS = "geometric-mis"
    """A row whose geometric mean of ratios is out of bounds weighs nothing, any other one."""
    ICEPOP = "icepop"
    """Like `token-mis`, with bounds on both sides."""


class PolicyOptions(BaseModel):
    """Settings that every policy-gradient algorithm has."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the initial policy; above 0, a frozen copy is kept."""
    kl_place: Literal["loss", "reward"] = "loss"
    """`loss` differentiates the estimate; `reward` takes what is still to come of it, summed over
    a row, off each token's advantage."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How a token's divergence is estimated; k3 is the choice of GRPO's paper."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; the papers that turn it on differ, so it is off."""
    mismatch: Mismatch = Mismatch.NONE
    """What is done about the engine's and the trainer's probabilities being different."""
    mismatch_low: float | None = Field(None, ge=0)
    """Least ratio, trainer over engine; none takes the rule's own."""
    mismatch_high: float | None = Field(None, gt=0)
    """Largest ratio, trainer over engine; none takes the rule's own."""

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

    @property
    def mismatch_bounds(self) -> tuple[float, float]:
        """The least and the largest ratio that pass as they are; the rule must not be `none`."""
        low, high = _BOUNDS[self.mismatch]
        return (
            low if self.mismatch_low is None else self.mismatch_low,
            high if self.mismatch_high is None else self.mismatch_high,
        )

    @field_validator("mismatch_high")
    @classmethod
    def _is_above_the_low(cls, value: float | None, info: ValidationInfo) -> float | None:
        rule = info.data.get("mismatch", Mismatch.NONE)
        if rule is not Mismatch.NONE:
            low, high = _BOUNDS[rule]
            low = low if info.data.get("mismatch_low") is None else info.data["mismatch_low"]
            high = high if value is None else value
            if high <= low:
                raise ValueError(f"the upper bound {high:g} must be above the lower bound {low:g}")
        return value


_BOUNDS = {
    Mismatch.TOKEN_TIS: (0.0, 2.0),
    Mismatch.SEQUENCE_TIS: (0.0, 2.0),
    Mismatch.TOKEN_MIS: (0.0, 2.0),
    Mismatch.SEQUENCE_MIS: (0.0, 2.0),
    Mismatch.GEOMETRIC_MIS: (0.999, 1.001),
    Mismatch.ICEPOP: (0.5, 5.0),
}
"""Each rule's own bounds; their sources stand in `_mismatch.py`."""
