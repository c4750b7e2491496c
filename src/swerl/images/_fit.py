"""Whether a row's diffs fit a source image: its work tree is a release's, not the commit's."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swerl.core.task import Task

_GIT = ("git", "-c", "safe.directory=*", "-c", "core.autocrlf=false", "apply", "--check")


def misfits(task: Task, testbed: Path) -> list[str]:
    """Return a line for the test patch and for the solution that does not apply as it stands."""
    diffs = {"test patch": task.grading.test_patch, "solution": task.gold_patch}
    return [
        f"its {name} does not apply: {said}"
        for name, diff in diffs.items()
        if diff and (said := _misfit(diff, testbed))
    ]


def _misfit(diff: str, testbed: Path) -> str:
    said = _objection(diff, testbed)
    if said and not _objection(diff, testbed, "--reverse"):
        return "the release has it already"
    return said


def _objection(diff: str, testbed: Path, *flags: str) -> str:
    text = (diff if diff.endswith("\n") else diff + "\n").encode("utf-8", "surrogateescape")
    done = subprocess.run(
        [*_GIT, *flags, "-"], cwd=testbed, input=text, capture_output=True, check=False
    )
    said = done.stderr.decode("utf-8", "replace").strip().split("\n")
    return said[0].removeprefix("error: ") if done.returncode else ""
