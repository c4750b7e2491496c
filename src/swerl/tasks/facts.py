"""What can be told about a Task without running it: the names that filters and tables use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swerl.core.chat import Json
from swerl.core.patch import touched
from swerl.core.task import Task


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
    "prompt_chars": lambda task: len(task.prompt),
    "patch_lines": _changed_lines,
    "patch_files": lambda task: len(touched(task.gold_patch)),
    "num_fail_to_pass": lambda task: len(task.grading.fail_to_pass),
    "num_pass_to_pass": lambda task: len(task.grading.pass_to_pass),
    "timeout_s": lambda task: task.grading.timeout_s,
}
"""Name -> how a Task answers it; None where it does not say."""

NUMBERS = ("prompt_chars", "patch_lines", "patch_files", "num_fail_to_pass", "num_pass_to_pass")
"""Facts that every Task has as a number."""
