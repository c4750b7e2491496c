"""The reward of an attempt: the recipe's reward function, less the penalties of its shaping."""

from __future__ import annotations

import math

from swerl.core import plugins
from swerl.core.contracts import Attempt, Reward
from swerl.core.episode import Status
from swerl.core.errors import PluginError
from swerl.core.turn import Trajectory
from swerl.recipe.schema import RolloutSection

_OVERLONG_FROM = 0.8
"""Fraction of `max_context_tokens` at which the penalty for long conversations begins."""


def reward_of(name: str) -> Reward:
    """Return a reward by its name; it raises PluginError if the function fails.

    Raises UnknownNameError, and InputError if it does not load.
    """
    function = plugins.reward(name)

    def checked(attempt: Attempt, /) -> float:
        with plugins.blaming("rewards", function):
            result = function(attempt)
        try:
            value = float(result)
        except (TypeError, ValueError):
            value = math.nan
        if math.isfinite(value):
            return value
        message = f"REWARD FAILED {name}: it returned {result!r} for {attempt.task.id}"
        raise PluginError(message, hint="return a finite number")

    return checked


def penalty(trajectory: Trajectory, status: Status, rollout: RolloutSection) -> float:
    """Return the penalty of an Episode by the rules of `rollout.shaping`, 0 or more."""
    rules = rollout.shaping
    total = rules.unfinished * (status is Status.LIMIT)
    if rules.overlong:
        limit = rollout.max_context_tokens
        total += rules.overlong * _overlong(trajectory, _OVERLONG_FROM * limit, limit)
    if rules.malformed:
        # The fraction of replies with a tool call that cannot be parsed.
        turns = trajectory.turns
        malformed = sum(turn.malformed_calls > 0 for turn in turns)
        total += rules.malformed * malformed / max(len(turns), 1)
    return total


def _overlong(trajectory: Trajectory, begin: float, limit: float) -> float:
    """Return 0 if the longest row has up to `begin` tokens, 1 from `limit` on, linear between.

    DAPO (arXiv 2503.14476), eq. 13, with L_max = limit and L_cache = limit - begin. The length
    includes prompts, because the context limit cuts off the whole conversation.
    """
    # The Turns on the path from the root to a leaf make one row.
    lengths = (
        sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in trajectory.path(leaf))
        for leaf in trajectory.leaves()
    )
    return min(max((max(lengths, default=0) - begin) / (limit - begin), 0.0), 1.0)
