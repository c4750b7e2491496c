"""Which Groups may begin and which are trained next, so that no token gets too old.

Groups stand in a queue in the order in which they began. A step takes the oldest finished ones,
so a slow Group lets others pass it; but it takes none as long as what stays behind could no longer
be trained in time. Every Group that begins is trained, however slow: short Episodes come earlier,
never more often.

All times are places of weight versions (`Versions`). A Group that began under version b may be
trained up to version b + `staleness`. Trained in the order of the queue, with n Groups a step, the
one at place p comes p // n steps after the next one. That schedule must always be possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Waiting(Protocol):
    """A Group in the queue."""

    @property
    def began(self) -> int:
        """Place of the version under which it began."""

    @property
    def is_finished(self) -> bool:
        """Whether all its Episodes are over."""


WaitingT = TypeVar("WaitingT", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the queue must keep to."""

    groups: int
    """Groups of a step."""
    staleness: int
    """Most versions between a Group's begin and its training."""
    pool: int
    """Most Groups in the queue."""


def may_begin(num_waiting: int, bounds: Bounds, *, served: int, trained_next: int) -> bool:
    """Return whether one more Group may begin under version `served`.

    `trained_next` is the version that the trainer will hold at the next step that takes Groups.
    """
    arrives = trained_next + num_waiting // bounds.groups
    return num_waiting < bounds.pool and arrives <= served + bounds.staleness


def choose(
    queue: Sequence[WaitingT], bounds: Bounds, *, version: int, wanted: int
) -> list[WaitingT] | None:
    """Return the oldest `wanted` finished Groups for a step that trains `version`.

    None while there are too few, or while a Group that would stay behind must not.
    """
    finished = [group for group in queue if group.is_finished][:wanted]
    if len(finished) < wanted:
        return None
    chosen = {id(group) for group in finished}
    left = [group for group in queue if id(group) not in chosen]
    in_time = all(
        version + 1 + place // bounds.groups <= group.began + bounds.staleness
        for place, group in enumerate(left)
    )
    return finished if in_time else None


def overdue(queue: Sequence[WaitingT], bounds: Bounds, *, version: int) -> list[WaitingT]:
    """Return the Groups that would be too old for a step that trains `version`."""
    return [group for group in queue if version > group.began + bounds.staleness]
