"""Every policy, in the order of the sheet."""

from __future__ import annotations

from collections.abc import Sequence

from swerl.checks.redteam import (
    answering,
    forging,
    future,
    greedy,
    leaving,
    outside,
    replacing,
    steering,
)
from swerl.checks.redteam.policy import Policy
from swerl.core.errors import unknown

_TOPICS = (future, steering, replacing, answering, forging, leaving, outside, greedy)


def all_policies() -> list[Policy]:
    """Return every policy."""
    return [policy for topic in _TOPICS for policy in topic.POLICIES]


def choose(names: Sequence[str]) -> list[Policy]:
    """Return the policies of these names, all where none is named. Raises UnknownNameError."""
    policies = {policy.name: policy for policy in all_policies()}
    for name in names:
        if name not in policies:
            raise unknown("policy", name, policies)
    return [policy for name, policy in policies.items() if not names or name in names]
