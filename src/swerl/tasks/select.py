"""Select Tasks of a file by repository, size, solve rate or at random; count the Tasks of a file.

Lines are copied unchanged. The random number of a Task is a hash of the seed and its id, so a seed
selects the same Tasks whatever else the file contains, and a larger sample contains a smaller one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swerl.core.changes import touched
from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.files import replacing
from swerl.core.task import Task, task_lines

_NUM_RANDOM = 256**7


@dataclass(frozen=True, slots=True)
class Choice:
    """Conditions on a Task; all of them must hold."""

    repos: tuple[str, ...] = ()
    """Repositories; empty: all."""
    max_files: int | None = None
    """Maximum files that the solution changes."""
    solve_rate: tuple[float, float] | None = None
    """Lowest and highest measured solve rate, ends included; a Task without one does not fit."""
    split: tuple[float, float] | None = None
    """Part of all Tasks as an interval of 0 to 1, its end excluded: (0, 0.9) and (0.9, 1) divide
    the Tasks of a file into 90 % and 10 %."""
    sample: int | None = None
    """Maximum number of Tasks, drawn at random."""
    seed: int = 0

    def fits(self, task: Task) -> bool:
        """Return True if a Task meets every condition but the sample's."""
        if self.repos and task.repo not in self.repos:
            return False
        if self.max_files is not None and len(touched(task.gold_patch)) > self.max_files:
            return False
        if self.solve_rate is not None:
            rate = task.metadata.get("solve_rate")
            low, high = self.solve_rate
            if not isinstance(rate, int | float) or not low <= rate <= high:
                return False
        if self.split is not None:
            low, high = self.split
            return low <= self.random(task) < high
        return True

    def random(self, task: Task) -> float:
        """Return a number from 0 to below 1 that depends on the seed and the Task's id only."""
        digest = hashlib.sha256(f"{self.seed} {task.id}".encode()).digest()
        return int.from_bytes(digest[:7]) / _NUM_RANDOM


def lines(path: Path) -> Iterator[tuple[bytes, Task]]:
    """Yield each line of a task file with its Task. Raises TaskError, also if there is none."""
    is_empty = True
    for line, task in task_lines(path):
        is_empty = False
        yield line, task
    if is_empty:
        raise TaskError(f"{path} has no task", hint="`swerl convert` lists why rows were rejected")


def filter_tasks(path: Path, out: Path, choice: Choice) -> tuple[int, int]:
    """Write the chosen Tasks in the file's order; return their number and the total.

    Raises RunError if `out` cannot be written.
    """
    ranks: dict[int, float] = {}
    num_all = 0
    for _, task in lines(path):
        if choice.fits(task):
            ranks[num_all] = choice.random(task)
        num_all += 1
    chosen = set(sorted(ranks, key=ranks.__getitem__)[: choice.sample])
    with replacing(out) as part, part.open("wb") as file, path.open("rb") as source:
        rows = (line for line in source if not line.isspace())
        file.writelines(
            line.rstrip(b"\n") + b"\n" for number, line in enumerate(rows) if number in chosen
        )
    return len(chosen), num_all


def _changed_lines(task: Task) -> int:
    lines = task.gold_patch.split("\n")
    return sum(line[:1] in {"+", "-"} and line[:4] not in {"+++ ", "--- "} for line in lines)


def _metadata(name: str) -> Callable[[Task], Json]:
    return lambda task: task.metadata.get(name)


FACTS: Mapping[str, Callable[[Task], Json]] = {
    "id": lambda task: task.id,
    "repo": lambda task: task.repo,
    "dataset": lambda task: task.dataset,
    "image": lambda task: task.image,
    "grader": lambda task: task.grading.grader,
    "log_parser": lambda task: task.grading.log_parser,
    "language": _metadata("language"),
    "difficulty": _metadata("difficulty"),
    "solve_rate": _metadata("solve_rate"),
    "strength": lambda task: task.certificate.get("strength"),
    "share": lambda task: task.certificate.get("share"),
    "why": lambda task: task.certificate.get("why"),
    "prompt_chars": lambda task: len(task.prompt),
    "patch_lines": _changed_lines,
    "patch_files": lambda task: len(touched(task.gold_patch)),
    "num_fail_to_pass": lambda task: len(task.grading.fail_to_pass),
    "num_pass_to_pass": lambda task: len(task.grading.pass_to_pass),
    "timeout_s": lambda task: task.grading.timeout_s,
}
"""Name -> function of a Task; None if the fact is missing."""
NUMBERS = ("prompt_chars", "patch_lines", "patch_files", "num_fail_to_pass", "num_pass_to_pass")
"""Numeric facts of every Task."""
GROUPED = ("dataset", "repo", "language", "grader", "difficulty")
"""Facts with counted values."""


@dataclass(slots=True)
class Stats:
    """Counts over a task file."""

    num_tasks: int = 0
    num_images: int = 0
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    """Fact -> value -> number of Tasks, the most frequent first."""
    numbers: dict[str, list[float]] = field(default_factory=dict)
    """Fact -> its smallest value, median, mean and largest value."""
    solve_rates: list[float] = field(default_factory=list)
    """Measured solve rates."""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(grader, log parser) -> number of Tasks."""


def count(tasks: Iterable[Task]) -> Stats:
    """Count Tasks; memory grows by a few numbers per Task."""
    stats = Stats()
    images: set[str] = set()
    groups: dict[str, Counter[str]] = {name: Counter() for name in GROUPED}
    values: dict[str, list[float]] = {name: [] for name in NUMBERS}
    for task in tasks:
        stats.num_tasks += 1
        images.add(task.image)
        stats.kinds[task.grading.grader, task.grading.log_parser] += 1
        for name, counter in groups.items():
            counter[str(FACTS[name](task) or "")] += 1
        for name, numbers in values.items():
            numbers.append(_number(FACTS[name](task)))
        if (rate := task.metadata.get("solve_rate")) is not None:
            stats.solve_rates.append(_number(rate))
    stats.num_images = len(images)
    stats.groups = {name: dict(counter.most_common()) for name, counter in groups.items()}
    stats.numbers = {name: _spread(numbers) for name, numbers in values.items() if numbers}
    return stats


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _spread(numbers: list[float]) -> list[float]:
    numbers.sort()
    median, mean = numbers[len(numbers) // 2], sum(numbers) / len(numbers)
    return [numbers[0], median, mean, numbers[-1]]
