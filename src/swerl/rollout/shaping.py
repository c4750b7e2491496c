"""Shaping: named rules that take something off a reward for length and for format."""

from __future__ import annotations

from swerl.core.tree import Trajectory
from swerl.recipe.schema import RolloutSection


def penalty(trajectory: Trajectory, rollout: RolloutSection) -> float:
    """Return what the rules of `rollout.shaping` take off the reward of an Episode, 0 or more."""
    rules = rollout.shaping
    found = 0.0
    if rules.overlong:
        limit = rollout.max_context_tokens
        found += rules.overlong * _overlong(trajectory, rules.overlong_from * limit, limit)
    if rules.malformed:
        found += rules.malformed * _malformed(trajectory)
    return found


def _overlong(trajectory: Trajectory, begin: float, limit: float) -> float:
    """Return 0 for a longest row of up to `begin` tokens, 1 from `limit` on, a line between.

    DAPO (arXiv 2503.14476), eq. 13, with L_max = limit and L_cache = limit - begin. The length is
    that of the whole conversation, prompts included: it is what the context limit cuts off.
    """
    lengths = (
        sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in trajectory.path(leaf))
        for leaf in trajectory.leaves()
    )
    return min(max((max(lengths, default=0) - begin) / (limit - begin), 0.0), 1.0)


def _malformed(trajectory: Trajectory) -> float:
    """Return the share of replies with a tool call that cannot be read."""
    turns = trajectory.turns
    return sum(turn.malformed_calls > 0 for turn in turns) / max(len(turns), 1)
