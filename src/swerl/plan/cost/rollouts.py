"""How many Episodes a step begins: those that are trained, those left out, and those lost."""

from __future__ import annotations

from functools import cache
from math import ceil, comb

from swerl.recipe.schema import RolloutSection

PASSING_SHARE = 0.6
"""Share of Groups that a filter lets through. Assumed: of tasks that are solved one time in ten to
nine in ten, eight attempts differ more often than not, and not all tasks are such."""
LOST_SHARE = 0.02
"""Share of attempts that the machinery loses. Assumed; `rollout.max_infra_rate` bounds it."""


def group_factor(rollout: RolloutSection, passing: float = PASSING_SHARE) -> float:
    """Return how many Groups a step begins on average for each that it wants.

    Groups pass the filter independently of each other. Those missing are begun anew, each time
    `oversample` times as many, at most `refill_rounds` times.
    """
    if rollout.group_filter == "none":
        return 1.0

    @cache
    def begun(missing: int, rounds: int) -> float:
        if not missing or rounds < 0:
            return 0.0
        size = ceil(missing * rollout.oversample)
        more = sum(
            _binomial(size, passed, passing) * begun(max(missing - passed, 0), rounds - 1)
            for passed in range(size + 1)
        )
        return size + more

    return begun(rollout.groups_per_step, rollout.refill_rounds) / rollout.groups_per_step


def attempts(rollout: RolloutSection, lost: float = LOST_SHARE) -> float:
    """Return how often an Episode is tried on average, at most `refills` times more than once."""
    return float(sum(lost**number for number in range(1 + rollout.refills)))


def _binomial(size: int, passed: int, share: float) -> float:
    return comb(size, passed) * share**passed * (1 - share) ** (size - passed)
