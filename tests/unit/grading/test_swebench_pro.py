"""The `swebench_pro` grader: the Task's own parser reads a log that no code inside can change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.grade import Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.graders import swebench_pro
from tests.unit.grading._folder_sandbox import opener
from tests.unit.grading.conftest import GOLD

RUN = "import calc\nprint('good add' if calc.add(2, 3) == 5 else 'bad add')\nprint('good zero')\n"
PARSER = """\
import json, sys
words = {"good": "PASSED", "bad": "FAILED", "skip": "SKIPPED"}
tests = [line.split() for line in open(sys.argv[1]) if line.startswith(tuple(words))]
report = {"tests": [{"name": name, "status": words[word]} for word, name in tests]}
json.dump(report, open(sys.argv[2], "w"))
"""


@pytest.fixture
def pro(task: Task, tmp_path: Path) -> Callable[..., Task]:
    """Build a Task with scripts in a folder of its own."""
    folder = tmp_path / "grading"

    def build(**changes: object) -> Task:
        spec = GradingSpec(
            "swebench_pro",
            fail_to_pass=("add",),
            pass_to_pass=("zero",),
            files={f"{folder}/run.py": RUN, f"{folder}/parser.py": PARSER},
            test_command=f"PYTHONPATH=. python3 {folder}/run.py",
            report_path=f"{folder}/output.json",
            report_command=(
                f"cat > {folder}/log; python3 {folder}/parser.py {folder}/log {folder}/output.json"
            ),
            timeout_s=20.0,
        )
        return replace(task, grading=replace(spec, **changes))

    return build


async def grade(task: Task, patch: str) -> Grade:
    return await swebench_pro.build().grade(task, patch, opener(task))


async def test_the_solution_is_solved_and_nothing_is_not(pro: Callable[..., Task]) -> None:
    assert (await grade(pro(), "")).verdict is Verdict.UNSOLVED
    assert (await grade(pro(), GOLD)).verdict is Verdict.SOLVED


@pytest.mark.parametrize(
    "command",
    ["echo good add; echo skip zero", "echo bad add; echo good zero; echo good add"],
    ids=["skipped", "listed twice"],
)
async def test_each_line_about_a_declared_test_must_be_good(
    pro: Callable[..., Task], command: str
) -> None:
    assert (await grade(pro(test_command=command), GOLD)).verdict is Verdict.UNSOLVED


async def test_tests_reach_neither_the_parser_nor_the_report(
    pro: Callable[..., Task], tmp_path: Path
) -> None:
    folder = tmp_path / "grading"
    forged = (
        '{"tests": [{"name": "add", "status": "PASSED"}, {"name": "zero", "status": "PASSED"}]}'
    )
    command = (
        f"echo bad add; echo '{forged}' | tee {folder}/output.json > {folder}/log; "
        f": > {folder}/parser.py"
    )
    result = await grade(pro(test_command=command), GOLD)
    assert result.verdict is Verdict.UNSOLVED


@pytest.mark.parametrize("broken", ["exit 1", "echo '{{' > {0}", "echo '[1]' > {0}", "rm -f {0}"])
async def test_no_report_is_unsolved(pro: Callable[..., Task], tmp_path: Path, broken: str) -> None:
    path = tmp_path / "grading" / "output.json"
    result = await grade(pro(report_command=broken.format(path)), GOLD)
    assert result.verdict is Verdict.UNSOLVED


async def test_tests_that_cannot_be_set_up_are_an_invalid_task(pro: Callable[..., Task]) -> None:
    result = await grade(pro(test_setup="git checkout -q 1234567 -- tests"), GOLD)
    assert result.verdict is Verdict.INVALID
    assert "cannot be set up" in result.reason
