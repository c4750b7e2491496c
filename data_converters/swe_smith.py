"""SWE-smith: bugs inserted into working repositories. A row's patch adds the bug.

The official harness fetches a branch per row. This converter applies the bug to the image's commit,
so that no network is necessary. An agent gets one commit without a past, with the bug and without
the test files that the bug breaks. The grader restores those files from the image's commit.
"""

from __future__ import annotations

import hashlib
import shlex

from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import Row, diff, fail_to_pass, optional_text, prompt, test_ids, text
from ._reverse_diff import reverse
from ._swe_bench_commands import ACTIVATE

SOURCE = "SWE-bench/SWE-smith"
ALSO = ("SWE-bench/SWE-smith-py",)
SPLITS = ("train",)

WORKDIR = "/testbed"
TIMEOUT_S = 1800.0
"""The limit of SWE-bench's harness, on which this dataset's harness is based."""
_CLEAN = "refs/swerl/clean"
"""Ref of the image's commit in a new sandbox. It is removed before the agent starts."""
_TEST = "pytest --disable-warnings --color=no --tb=no --verbose -rA"
"""The dataset's command, with a summary at the end for the parser."""
_SETUP = """set -e
git update-index -q --refresh || true
git update-ref {clean} HEAD
git apply --index --whitespace=nowarn - <<'{end}'
{patch}
{end}
git rm -q -f --ignore-unmatch -- {files}
tree=$(git write-tree)
commit=$(git -c user.name=swerl -c user.email=swerl@localhost commit-tree -m base "$tree")
git reset -q "$commit"
"""


def to_task(row: Row) -> Task:
    """Turn a row into a Task. Raises TaskError if its language is not Python."""
    task_id, repo = text(row, "instance_id"), text(row, "repo")
    if not repo.startswith("swesmith/"):
        raise TaskError(f"repository {repo} is not one of SWE-smith's mirrors")
    bug = diff(row, "patch")
    broken, working = fail_to_pass(row), test_ids(row, "PASS_TO_PASS")
    hidden = shlex.join(_files(broken))
    spec = GradingSpec(
        grader="swebench",
        fail_to_pass=broken,
        pass_to_pass=working,
        test_setup=f"git checkout -q {_CLEAN} -- {hidden}",
        test_command=f"{ACTIVATE}\n{_TEST} {shlex.join(_files((*broken, *working)))}",
        log_parser="pytest",
        timeout_s=TIMEOUT_S,
    )
    return Task(
        id=task_id,
        repo=repo,
        image=optional_text(row, "image_name") or image(repo),
        workdir=WORKDIR,
        prompt=prompt(text(row, "problem_statement"), WORKDIR),
        grading=spec,
        gold_patch=reverse(bug),
        dataset=SOURCE,
        setup=_setup(bug, hidden),
    )


def image(repo: str) -> str:
    """Return the image of a repository such as `swesmith/owner__name.commit`."""
    name = repo.removeprefix("swesmith/").lower().replace("__", "_1776_")
    return f"jyangballin/swesmith.x86_64.{name}"


def _setup(bug: str, hidden: str) -> str:
    end = "END_" + hashlib.sha256(bug.encode("utf-8", "replace")).hexdigest()[:12]
    return _SETUP.format(clean=_CLEAN, patch=bug.rstrip("\n"), end=end, files=hidden)


def _files(ids: tuple[str, ...]) -> list[str]:
    files = list(dict.fromkeys(name.split("::")[0] for name in ids))
    if not all(name.endswith(".py") for name in files):
        raise TaskError("the tests are not pytest's, and the row has no other test command")
    return files
