"""Rewards: named rules from a Grade and a status to one number, and penalties off it.

A package outside swerl registers a rule as an entry point of the group `swerl.rewards`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from swerl.core.episode import Status
from swerl.core.errors import unknown
from swerl.core.grade import Grade, Verdict
from swerl.core.turn import Trajectory
from swerl.recipe.schema import RolloutSection

Rule = Callable[[Grade, Status], float]


def rule(name: str) -> Rule:
    """Return the rule of this name, built in or an entry point. Raises UnknownNameError."""
    if name in _RULES:
        return _RULES[name]
    entries = entry_points(group="swerl.rewards")
    for entry in entries:
        if entry.name == name:
            outside: Rule = entry.load()
            return outside
    raise unknown("reward rule", name, [*_RULES, *(entry.name for entry in entries)])


def _solved(grade: Grade, status: Status) -> float:
    """1 for a solved Task, 0 for everything else; a timeout counts as unsolved."""
    return float(grade.verdict is Verdict.SOLVED)


def _solved_in_time(grade: Grade, status: Status) -> float:
    """Like `solved`, but an Episode that exceeded a time budget gets -0.5."""
    timed_out = Verdict.TIMEOUT is grade.verdict or status is Status.TIMEOUT
    return -0.5 if timed_out else _solved(grade, status)


_RULES: dict[str, Rule] = {"solved": _solved, "solved-in-time": _solved_in_time}


def penalty(trajectory: Trajectory, rollout: RolloutSection) -> float:
    """Return the penalty of an Episode by the rules of `rollout.shaping`, 0 or more."""
    rules = rollout.shaping
    found = 0.0
    if rules.overlong:
        limit = rollout.max_context_tokens
        found += rules.overlong * _overlong(trajectory, rules.overlong_from * limit, limit)
    if rules.malformed:
        # The fraction of replies with a tool call that cannot be parsed.
        turns = trajectory.turns
        malformed = sum(turn.malformed_calls > 0 for turn in turns)
        found += rules.malformed * malformed / max(len(turns), 1)
    return found


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
