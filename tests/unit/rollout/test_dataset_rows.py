"""Rows of R2E-Gym and SWE-bench Pro through whole Episodes: the solution wins, a cheat does not."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.grade import Verdict
from swerl.core.task import Task
from swerl.recipe.schema import BudgetsSection
from swerl.tasks.datasets import find_converter
from tests.unit.data_converters.examples import PARSED_COMMIT, PRO, R2E, Row

from .test_episode import Replies, attempt, gold, say

pytestmark = pytest.mark.integration

BUDGETS = BudgetsSection(
    model_call_s=60, tool_s=60, agent_s=240, grading_s=300, episode_s=540, sandbox_s=600
)
WRONG, RIGHT = (f"def add(a, b):\n    return a {sign} b\n" for sign in "-+")
TESTS = """\
from sums import add


def test_add():
    assert add(1, 2) == 3


def test_more():
    assert add(5, 2) == 7
"""
NAMES = ("test_add", "test_more")
REPORT = dict.fromkeys(NAMES, "PASSED")
PATHS = [f"tests/test_sums.py::{name}" for name in NAMES]
PARSER = """\
import json, sys
out, err, report = sys.argv[1:]
lines = [line.split() for line in open(out) if line.startswith("tests/") and "::" in line]
tests = [{"name": words[0], "status": words[1]} for words in lines]
json.dump({"tests": tests}, open(report, "w"))
"""
FIX = f"""\
diff --git a/sums.py b/sums.py
--- a/sums.py
+++ b/sums.py
@@ -2 +2 @@
-{WRONG.splitlines()[1]}
+{RIGHT.splitlines()[1]}
"""
GIT = "git -c user.name=a -c user.email=a@b"


def sh(script: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-ec", script], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def adapted(task: Task, folder: Path) -> Task:
    """The Task of a row, on a folder in place of its image."""
    spec = replace(task.grading, timeout_s=120.0)
    return replace(task, image=f"dir:{folder}", grading=spec)


@pytest.fixture
def r2e(tmp_path: Path) -> Task:
    """A row of R2E-Gym; its image has the answers, as the official images do."""
    (tmp_path / "sums.py").write_text(WRONG)
    (tmp_path / ".gitignore").write_text(".venv\n")
    sh(f"git init -q -b main; git add -A; {GIT} commit -qm base; mkdir -p .venv/bin", tmp_path)
    (tmp_path / ".venv/bin/python").write_text('#!/bin/sh\nexec python3 "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    (tmp_path / "expected_test_output.json").write_text(json.dumps(REPORT))
    (tmp_path / "r2e_tests").mkdir()
    (tmp_path / "r2e_tests/test_1.py").write_text(TESTS)
    commit = json.loads(json.dumps(PARSED_COMMIT).replace("src/sums.py", "sums.py"))
    [hunk] = commit["file_diffs"][0]["hunks"]
    hunk["descriptor"] |= {"old_range": {"start": 2}, "new_range": {"start": 2}}
    for line in hunk["line_group"]["all_lines"]:
        line["content"] = f"    {line['content']}"
    tests = {"test_file_names": ["test_1.py"], "test_file_codes": [TESTS]}
    row: Row = {
        **R2E,
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": json.dumps(tests),
        "expected_output_json": json.dumps(REPORT),
    }
    return adapted(find_converter("r2e-gym").to_task(row), tmp_path)


@pytest.fixture
def pro(tmp_path: Path) -> Task:
    """A row of SWE-bench Pro; the solution's commit, which has the tests, is in its image."""
    (tmp_path / "sums.py").write_text(WRONG)
    script = f"git init -q -b main; git add -A; {GIT} commit -qm base; git rev-parse HEAD"
    base = sh(script, tmp_path)
    (tmp_path / "sums.py").write_text(RIGHT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_sums.py").write_text(TESTS)
    fixed = sh(f"git add -A; {GIT} commit -qm fix; git rev-parse HEAD", tmp_path)
    test_patch = sh(f"git diff {base} {fixed} -- tests", tmp_path) + "\n"
    sh(f"git reset -q --hard {base}; git branch later {fixed}", tmp_path)
    row: Row = {
        **PRO,
        "base_commit": base,
        "patch": FIX,
        "test_patch": test_patch,
        "fail_to_pass": str(PATHS),
        "pass_to_pass": "[]",
        "before_repo_set_cmd": (
            f"git reset --hard {base}\ngit clean -fd \ngit checkout {base} \n"
            f"git checkout {fixed} -- tests/test_sums.py"
        ),
        "run_script": "#!/bin/bash\npython3 -m pytest -v -p no:cacheprovider ${1//,/ }\n",
        "parser_script": PARSER,
    }
    return adapted(find_converter("swe-bench-pro").to_task(row), tmp_path)


async def verdict(task: Task, *commands: str) -> Verdict:
    said = [say("bash", command=command) for command in commands]
    ended = await attempt(task, Replies(*said, say("submit")), BUDGETS)
    assert ended.reward == float(ended.verdict is Verdict.SOLVED)
    return ended.verdict


@pytest.mark.parametrize("name", ["r2e", "pro"])
async def test_the_solution_is_solved_and_nothing_is_not(
    name: str, request: pytest.FixtureRequest
) -> None:
    task: Task = request.getfixturevalue(name)
    ended = await attempt(task, Replies(*gold(task)), BUDGETS)
    assert ended.verdict is Verdict.SOLVED, ended.grade.reason
    assert await verdict(task) is Verdict.UNSOLVED
