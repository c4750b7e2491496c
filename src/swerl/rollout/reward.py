"""Reward rules by name: a Grade and a status become one number.

A package outside swerl registers a function as an entry point of the group `swerl.rewards`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from swerl.core.episode import Status
from swerl.core.errors import unknown
from swerl.core.grade import Grade, Verdict

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
    """1 for a solved Task, 0 for everything else; a timeout counts as not solved."""
    return float(grade.verdict is Verdict.SOLVED)


def _solved_in_time(grade: Grade, status: Status) -> float:
    """Like `solved`, but an Episode that ran into a time budget gets -0.5."""
    timed_out = Verdict.TIMEOUT is grade.verdict or status is Status.TIMEOUT
    return -0.5 if timed_out else _solved(grade, status)


_RULES: dict[str, Rule] = {"solved": _solved, "solved-in-time": _solved_in_time}
