"""What a file of Tasks holds, counted in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from swerl.core.task import Task
from swerl.tasks.facts import FACTS, NUMBERS

GROUPED = ("dataset", "repo", "language", "grader", "difficulty")
"""Facts whose values are counted."""


@dataclass(slots=True)
class Stats:
    """The counts of a file."""

    num_tasks: int = 0
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    """Fact -> value -> number of Tasks, the most frequent first."""
    numbers: dict[str, list[float]] = field(default_factory=dict)
    """Fact -> its smallest value, median, mean and largest value."""
    num_images: int = 0
    solve_rates: list[float] = field(default_factory=list)
    """Of the Tasks that were probed."""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(grader, log parser) -> number of Tasks."""


def count(tasks: Iterable[Task]) -> Stats:
    """Count Tasks; memory grows by some numbers for each of them."""
    stats = Stats()
    groups: dict[str, Counter[str]] = {name: Counter() for name in GROUPED}
    images: set[str] = set()
    values: dict[str, list[float]] = {name: [] for name in NUMBERS}
    for task in tasks:
        stats.num_tasks += 1
        images.add(task.image)
        stats.kinds[task.grading.grader, task.grading.log_parser] += 1
        for name, counter in groups.items():
            counter[str(FACTS[name](task) or "")] += 1
        for name, found in values.items():
            found.append(_number(FACTS[name](task)))
        if (rate := task.metadata.get("solve_rate")) is not None:
            stats.solve_rates.append(_number(rate))
    stats.num_images = len(images)
    stats.groups = {name: dict(each.most_common()) for name, each in groups.items()}
    stats.numbers = {name: _spread(found) for name, found in values.items() if found}
    return stats


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _spread(found: list[float]) -> list[float]:
    found.sort()
    return [found[0], found[len(found) // 2], sum(found) / len(found), found[-1]]
