"""Random loss inputs with the edge cases of real batches, as arrays and as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from swerl.core import plugins
from swerl.core.episode import Group
from swerl.core.learning import LossInputs, Totals
from tests.unit import made

Arrays = Mapping[str, np.ndarray]

NAMES = ("gspo", "grpo", "dr-grpo", "dapo", "cispo", "reinforce-pp")
"""Algorithms that learn from Groups."""
FAN_OUT = (1, 2, 3)
"""Samples of each Episode of the random batch."""


def make(name: str, **options: Any) -> Any:
    """Build an algorithm as a recipe would."""
    module = plugins.load("algorithms", name)
    return module.build(module.Options.model_validate(options))


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Six rows of three Episodes: one reply of one token, one row that trains nothing."""
    rng = np.random.default_rng(0)
    num_rows, length = sum(FAN_OUT), 9
    token = np.ones((num_rows, length))
    token[2, 6:] = 0
    mask = (rng.random((num_rows, length)) < 0.6) * token
    mask[1] = 0
    mask[1, 3] = 1
    mask[4] = 0
    owner = np.repeat(np.arange(len(FAN_OUT)), FAN_OUT)
    num_tokens = mask.sum(1)
    share = num_tokens / np.bincount(owner, weights=num_tokens)[owner]
    logp = -3 * rng.random((num_rows, length)) * token
    return {
        "logp": logp,
        "old_logp": (logp + 0.01 * rng.standard_normal(logp.shape)) * token,
        "ref_logp": (logp + 0.3 * rng.standard_normal(logp.shape)) * token,
        "mask": mask,
        "token": token,
        "advantage": rng.standard_normal(num_rows),
        "weight": share / len(FAN_OUT),
    }


@pytest.fixture
def to_inputs() -> Callable[..., LossInputs]:
    """Turn arrays into what a loss reads, in double precision."""

    def convert(arrays: Arrays, totals: Totals | None = None) -> LossInputs:
        tensors = {
            name: torch.from_numpy(array.astype(np.float64)) for name, array in arrays.items()
        }
        return LossInputs(
            logp_BT=tensors["logp"].requires_grad_(),
            old_logp_BT=tensors["old_logp"],
            ref_logp_BT=tensors.get("ref_logp"),
            mask_BT=tensors["mask"],
            token_BT=tensors["token"],
            advantage_B=tensors["advantage"],
            weight_B=tensors["weight"],
            totals=totals or Totals(len(FAN_OUT), int(arrays["mask"].sum())),
        )

    return convert


@pytest.fixture
def group() -> Callable[..., Group]:
    """Make a Group from (verdict, reward) pairs."""

    def make(*outcomes: tuple[str, float]) -> Group:
        episodes = (
            made.episode(f"episode-{number}", verdict=verdict, reward=reward)
            for number, (verdict, reward) in enumerate(outcomes)
        )
        return Group("task", tuple(episodes))

    return make


def slope(loss: Callable[[Arrays], float], arrays: Arrays) -> np.ndarray:
    """Return the numeric gradient of a written-out loss by `logp`, by central differences."""
    step = 1e-6
    found = np.zeros_like(arrays["logp"])
    for place in np.ndindex(found.shape):
        ends = []
        for sign in (1, -1):
            moved = {**arrays, "logp": arrays["logp"].copy()}
            moved["logp"][place] += sign * step
            ends.append(loss(moved))
        found[place] = (ends[0] - ends[1]) / (2 * step)
    return found
