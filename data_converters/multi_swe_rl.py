"""Multi-SWE-RL and Multi-SWE-bench: seven languages, with the test command inside the image."""

from __future__ import annotations

from collections.abc import Iterable

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import Row, commit, diff, json_object, needed, optional_text, prompt, text

SOURCE = "ByteDance-Seed/Multi-SWE-RL"
ALSO = ("ByteDance-Seed/Multi-SWE-bench",)
SPLITS = ("train",)
FILES = "*.jsonl"
"""The hub has one file per repository, and their columns differ in type."""

TIMEOUT_S = 3600.0
"""Builds of the larger repositories take longer than their tests."""
_FIXED = ("f2p_tests", "s2p_tests", "n2p_tests")
"""Columns of tests that pass only after the solution: failed, skipped or absent before it."""


def to_task(row: Row) -> Task:
    """Turn a row into a Task."""
    org, repo, number = text(row, "org"), text(row, "repo"), _number(row)
    workdir = f"/home/{repo}"
    spec = GradingSpec(
        grader="command",
        fail_to_pass=needed(_passing(row, _FIXED), ", ".join(_FIXED)),
        pass_to_pass=_passing(row, ("p2p_tests",)),
        test_patch=diff(row, "test_patch"),
        test_command="bash /home/run.sh",
        log_parser=f"multi_swe/{org}/{repo}",
        timeout_s=TIMEOUT_S,
    )
    return Task(
        id=optional_text(row, "instance_id") or f"{org}__{repo}-{number}",
        repo=f"{org}/{repo}",
        image=f"mswebench/{org}_m_{repo}:pr-{number}".lower(),
        workdir=workdir,
        prompt=prompt(_problem(row), workdir),
        grading=spec,
        base_commit=commit(json_object(row, "base"), "sha"),
        gold_patch=diff(row, "fix_patch"),
        dataset=SOURCE,
    )


def _number(row: Row) -> int:
    number = row.get("number")
    if not isinstance(number, int) or isinstance(number, bool):
        raise TaskError("column number is not the number of a pull request")
    return number


def _passing(row: Row, columns: Iterable[str]) -> tuple[str, ...]:
    """Return the tests of these columns that pass with the solution."""
    test_ids: dict[str, None] = {}
    for column in columns:
        tests = json_object(row, column)
        test_ids.update(dict.fromkeys(name for name, runs in tests.items() if _passes(runs)))
    return tuple(test_ids)


def _passes(runs: Json) -> bool:
    return isinstance(runs, dict) and runs.get("fix") == "PASS"


def _problem(row: Row) -> str:
    """Return the issues that the pull request closes. Its own text would reveal the solution."""
    issues = row.get("resolved_issues")
    if not isinstance(issues, list) or not issues:
        raise TaskError("resolved_issues is empty: no text describes the problem")
    parts = []
    for issue in issues:
        if not isinstance(issue, dict):
            raise TaskError("resolved_issues contains no issue with text")
        parts.append(f"{optional_text(issue, 'title')}\n{optional_text(issue, 'body')}".strip())
    return text({"resolved_issues": "\n\n".join(parts)}, "resolved_issues")
