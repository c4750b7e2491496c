"""The `swebench` grader: both lists decide, by SWE-bench's own rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swerl.core.grade import Grade, Verdict
from swerl.core.task import Task
from swerl.grading.graders import swebench
from tests.unit.grading._folder_sandbox import opener


async def grade(task: Task) -> Grade:
    return await swebench.build().grade(task, "", opener(task))


def prints(*lines: str, code: int = 0) -> dict[str, object]:
    text = "\\n".join(lines)
    return {"test_command": f"printf '{text}\\n'; exit {code}", "log_parser": "pytest"}


@pytest.mark.parametrize(
    ("must", "keep", "verdict"),
    [
        ("PASSED", "PASSED", Verdict.SOLVED),
        ("XFAIL", "XFAIL", Verdict.SOLVED),
        ("PASSED", "SKIPPED", Verdict.SOLVED),
        ("SKIPPED", "PASSED", Verdict.UNSOLVED),
        ("PASSED", "FAILED", Verdict.UNSOLVED),
        ("ERROR", "PASSED", Verdict.UNSOLVED),
        ("XPASS", "PASSED", Verdict.UNSOLVED),
        ("PASSED", "no line of", Verdict.UNSOLVED),
    ],
)
async def test_statuses_that_count(
    with_spec: Callable[..., Task], must: str, keep: str, verdict: Verdict
) -> None:
    task = with_spec(**prints(f"{must} test_add", f"{keep} test_zero"))
    assert (await grade(task)).verdict is verdict


@pytest.mark.parametrize(
    ("second", "verdict"), [("PASSED", Verdict.SOLVED), ("FAILED", Verdict.UNSOLVED)]
)
async def test_a_cut_id_means_every_test_that_it_begins(
    with_spec: Callable[..., Task], second: str, verdict: Verdict
) -> None:
    lines = prints("PASSED t[a-1]", f"{second} t[a-2]", "PASSED test_zero")
    task = with_spec(**lines, fail_to_pass=("t[a",))
    assert (await grade(task)).verdict is verdict


@pytest.mark.parametrize("line", ["FAILED x", "FAIL Required test", "  3 failing", "i fail 1"])
async def test_failures_outside_the_lists_do_not_matter(
    with_spec: Callable[..., Task], line: str
) -> None:
    lines = prints("PASSED test_add", "PASSED test_zero", line, code=1)
    assert (await grade(with_spec(**lines))).verdict is Verdict.SOLVED


async def test_a_failed_command_without_a_failing_test_is_not_believed(
    with_spec: Callable[..., Task],
) -> None:
    result = await grade(with_spec(**prints("PASSED test_add", "PASSED test_zero", code=3)))
    assert result.verdict is Verdict.UNSOLVED
    assert "exit code 3" in result.reason


@pytest.mark.parametrize("change", [{"fail_to_pass": ()}, {"log_parser": ""}])
async def test_broken_task_is_invalid(
    with_spec: Callable[..., Task], change: dict[str, object]
) -> None:
    lines = prints("PASSED test_add", "PASSED test_zero")
    assert (await grade(with_spec(**{**lines, **change}))).verdict is Verdict.INVALID
