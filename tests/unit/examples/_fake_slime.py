"""A stand-in for slime: its Sample, and its use of the hooks' results.

Written to slime's contract as of August 2026 (slime/utils/types.py, slime/ray/rollout.py and
slime/rollout/sglang_rollout.py): the fields, how a group is rolled out, how rewards are normalised
where no hook does it, and how samples become training data.
"""

from __future__ import annotations

import asyncio
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean, stdev
from typing import Any


@dataclass
class Sample:
    """One row of slime's; the fields that this test needs, under slime's names and types."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    non_generation_time: float = 0.0


def arguments(**more: Any) -> Namespace:
    """Return the arguments that hooks read, with slime's defaults."""
    return Namespace(**{
        "hf_checkpoint": "", "sglang_router_ip": "127.0.0.1", "sglang_router_port": 0,
        "advantage_estimator": "grpo", "rewards_normalization": True,
        "grpo_std_normalization": True, "n_samples_per_prompt": 2, "rollout_batch_size": 1,
        "custom_reward_post_process_path": "swerl_slime.hooks.normalize",
        "rollout_max_context_len": None, "partial_rollout": False, "group_rm": False,
        "use_rollout_routing_replay": False,
    } | more)  # fmt: skip


async def rolled_out(
    args: Namespace, group: Sequence[Sample], generate: Callable[..., Any], params: dict[str, Any]
) -> list[list[Sample]]:
    """Roll out a prompt's samples as `generate_and_rm_group` does, in training."""
    assert "evaluation" in inspect.signature(generate).parameters
    calls = (generate(args, one, dict(params), evaluation=False) for one in group)
    found = await asyncio.gather(*calls)
    return [one if isinstance(one, list) else [one] for one in found]


def own_normalisation(args: Namespace, samples: Sequence[Sample]) -> list[float]:
    """Normalise rewards as slime does without a hook: one group where a count differs."""
    rewards: list[float] = [one.reward for one in samples]  # type: ignore[misc]
    size = args.n_samples_per_prompt
    if len(rewards) != size * args.rollout_batch_size:
        size = len(rewards)
    out: list[float] = []
    for start in range(0, len(rewards), size):
        row = rewards[start : start + size]
        out += [(reward - fmean(row)) / (stdev(row) + 1e-6) for reward in row]
    return out


def train_data(
    args: Namespace, samples: Sequence[Sample], normalize: Callable[..., Any]
) -> dict[str, list[Any]]:
    """Convert samples as `_convert_samples_to_train_data` does, with its assertions."""
    raw, rewards = normalize(args, samples)
    assert len(raw) == len(rewards) == len(samples)
    for one in samples:
        assert one.loss_mask is not None
        assert len(one.loss_mask) == one.response_length <= len(one.tokens)
        assert one.rollout_log_probs is not None
        assert len(one.rollout_log_probs) == one.response_length
        assert one.rollout_id is not None
    masks = [[0] * one.response_length if one.remove_sample else one.loss_mask for one in samples]
    return {"rewards": rewards, "raw_reward": raw, "loss_masks": masks}
