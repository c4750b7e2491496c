"""Group filters: which Groups of a step are worth training, by the name of a rule."""

from __future__ import annotations

from collections.abc import Callable

from swerl.core.episode import Group
from swerl.core.errors import unknown
from swerl.core.grade import Verdict

GroupFilter = Callable[[Group], bool]
"""Whether a Group is trained."""


def group_filter(name: str) -> GroupFilter:
    """Return the filter of this name. Raises UnknownNameError."""
    if name not in _FILTERS:
        raise unknown("group filter", name, _FILTERS)
    return _FILTERS[name]


def _everything(group: Group) -> bool:
    """Keep all Groups."""
    return True


def _zero_variance(group: Group) -> bool:
    """Keep Groups whose learnable Episodes have different rewards; all others teach nothing."""
    return group.has_signal


def _mixed_verdicts(group: Group) -> bool:
    """Keep Groups with at least one solved and one other learnable Episode.

    DAPO (arXiv 2503.14476), eq. 11. Unlike a variance of rewards it does not see shaping.
    """
    solved = {e.verdict is Verdict.SOLVED for e in group.episodes if e.learnable}
    return len(solved) > 1


_FILTERS: dict[str, GroupFilter] = {
    "none": _everything,
    "zero-variance": _zero_variance,
    "mixed-verdicts": _mixed_verdicts,
}
