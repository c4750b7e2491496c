"""SWE-smith: bugs put into working repositories; a row's patch brings the bug.

The official harness fetches a branch per row. Here the bug is applied to the image's own commit,
so that no network is needed. An agent gets one commit without a past: the bug in it, and without
the test files that it breaks. Grading takes those files back from the image's commit.
"""

from __future__ import annotations

import hashlib
import shlex

from swerl.core.errors import TaskError
from swerl.core.task import GradingSpec, Task

from ._common import Row, diff, optional_text, prompt, test_ids, tests_to_mend, text
from ._reverse_diff import reverse
from ._swe_bench_commands import ACTIVATE

SOURCE = "SWE-bench/SWE-smith"
SPLITS = ("train",)

WORKDIR = "/testbed"
TIMEOUT_S = 1800.0
"""The limit for a task of SWE-bench, whose harness this one's is made from."""
_CLEAN = "refs/swerl/clean"
"""Where a new sandbox keeps the image's commit; an agent's sandbox loses it before the agent."""
_TEST = "pytest --disable-warnings --color=no --tb=no --verbose -rA"
"""The dataset's own command, and a summary at the end, which the parser reads."""
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
    """Turn a row into a Task. Raises TaskError on rows of other languages than Python."""
    task_id, repo = text(row, "instance_id"), text(row, "repo")
    if not repo.startswith("swesmith/"):
        raise TaskError(f"repository {repo} is none of SWE-smith's mirrors")
    bug = diff(row, "patch")
    mend, keep = tests_to_mend(row), test_ids(row, "PASS_TO_PASS")
    hidden = shlex.join(_files(mend))
    spec = GradingSpec(
        grader="swebench",
        fail_to_pass=mend,
        pass_to_pass=keep,
        test_setup=f"git checkout -q {_CLEAN} -- {hidden}",
        test_command=f"{ACTIVATE}\n{_TEST} {shlex.join(_files((*mend, *keep)))}",
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
        raise TaskError("the tests are not pytest's, and the row brings no other test command")
    return files
