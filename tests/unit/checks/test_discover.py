"""Tests are declared by how they end before and after the solution, in every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swerl.checks.discover import Discovery, discover
from swerl.checks.vet import GradedRun
from swerl.core.grade import Grade, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading.flow import LOG_CHARS

DIFF = """\
diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
"""
TASK = Task("a", "r", "host", "/w", "p", GradingSpec("swebench", test_patch=DIFF), gold_patch="g")


@dataclass
class Logs:
    """Stand in for runs of the tests; each gives the next log of its side."""

    before: Iterator[str]
    after: Iterator[str]
    verdict: Verdict = Verdict.UNSOLVED

    async def grade(self, task: Task, patch: str) -> GradedRun:
        log = next(self.after if patch else self.before)
        return GradedRun(Grade(self.verdict, "a reason", log=log))


async def found(before: list[str], after: list[str], **fields: Any) -> Discovery:
    return await discover(TASK, Logs(iter(before), iter(after), **fields))  # type: ignore[arg-type]


async def test_each_test_is_sorted_by_its_results() -> None:
    ids = {name: f"tests/test_a.py::test_{name}" for name in ("new", "fixed", "kept", "odd", "bad")}
    other = "tests/test_b.py::test_other"
    before = (
        f"FAILED {ids['fixed']} - x\nPASSED {ids['kept']}\nFAILED {ids['bad']} - x\n"
        f"FAILED {ids['odd']} - x\n"
    )
    after = (
        f"PASSED {ids['new']}\nPASSED {ids['fixed']}\nPASSED {ids['kept']}\n"
        f"FAILED {ids['bad']} - x\nPASSED {other}\n"
    )
    last = f"{after}FAILED {ids['odd']} - x\n"
    tests = await found([before] * 3, [f"{after}PASSED {ids['odd']}\n"] * 2 + [last])
    assert set(tests.fail_to_pass) == {ids["new"], ids["fixed"]}
    assert set(tests.pass_to_pass) == {ids["kept"], other}
    assert tests.flaky == (ids["odd"],)
    assert (tests.log_parser, tests.problem) == ("pytest", "")


LOGS = Path(__file__).with_name("runner_logs")
"""A runner's log, shortened, by its parser; those of Go, Gradle and RSpec are written by hand."""


@pytest.mark.parametrize("file", sorted(LOGS.iterdir()), ids=lambda file: file.stem)
async def test_the_log_of_each_runner_is_read_by_its_own_parser(file: Path) -> None:
    tests = await found([" "] * 3, [file.read_text()] * 3)
    assert (tests.log_parser, len(tests.flaky)) == (file.stem.partition("-")[0], 0)


@pytest.mark.parametrize(
    ("after", "verdict", "problem"),
    [
        ("PASSED a\n", Verdict.UNSOLVED, "makes no test pass that failed before"),
        ("no\nresult\n", Verdict.UNSOLVED, "no test passes with the solution; its log ends: res"),
        ("ERROR a - x\nend\n", Verdict.UNSOLVED, "no test passes with the solution; its log ends"),
        pytest.param("PASSED a\n" * LOG_CHARS, Verdict.UNSOLVED, "its log is too long", id="cut"),
        ("PASSED a\n", Verdict.TIMEOUT, "a reason"),
        ("", Verdict.UNSOLVED, "a reason"),
    ],
)
async def test_a_lack_of_tests_has_a_reason(after: str, verdict: Verdict, problem: str) -> None:
    tests = await found(["PASSED a\n"], [after], verdict=verdict)
    assert problem in tests.problem and not tests.fail_to_pass
