"""A dataset: repositories with one wrong line, one JSON row a bug.

{"name": "add", "repo": "/repos/add", "prompt": "Fix add().", "diff": "…", "check": "python3 -c …"}
"""

from __future__ import annotations

from collections.abc import Mapping

from swerl.core.chat import Json
from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

SOURCE = ""
"""Hub id of the dataset; empty because it is on no hub."""
SPLITS = ("train",)
_COLUMNS = ("name", "repo", "prompt", "diff", "check")


def to_task(row: Mapping[str, Json]) -> Task:
    """Convert a row. Raises TaskError with the reason for the rejects file."""
    name, repo, prompt, diff, check = (_text(row, column) for column in _COLUMNS)
    return Task(
        id=f"one-line-bugs__{name}",
        repo=name,
        image=f"dir:{repo}",  # a folder on this machine; an OCI name works as well
        workdir="/repo",
        prompt=prompt,
        # The agent sees neither the check nor the solution.
        grading=GradingSpec(grader="command", test_command=check, timeout_s=60),
        gold_patch=diff,
        dataset="one-line-bugs",
    )


def _text(row: Mapping[str, Json], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value:
        raise TaskError(f"column {column} is not a text")
    return value
