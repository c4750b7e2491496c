"""The `r2e` grader: the whole report must be the recorded one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swerl.core.grade import Grade, Verdict
from swerl.core.task import Task
from swerl.grading.graders import r2e
from tests.unit.grading._folder_sandbox import opener

EXPECTED = {"test_a": "PASSED", "K.test_b": "FAILED"}


async def grade(with_spec: Callable[..., Task], *lines: str, **changes: object) -> Grade:
    text = "\\n".join(["== short test summary info ==", *lines])
    # Its exit code says failure, as that of a recorded report with failures does.
    command = f"printf '{text}\\n'; exit 1"
    task = with_spec(**{"test_command": command, "expected": EXPECTED, **changes})
    return await r2e.build().grade(task, "", opener(task))


async def test_recorded_report_is_solved(with_spec: Callable[..., Task]) -> None:
    result = await grade(with_spec, "PASSED x.py::test_a", "FAILED x.py::K::test_b - boom")
    assert result.verdict is Verdict.SOLVED


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["PASSED x.py::test_a", "PASSED x.py::K::test_b"], "K.test_b (passed)"),
        (["PASSED x.py::test_a"], "K.test_b (missing)"),
        (
            ["PASSED x.py::test_a", "FAILED x.py::K::test_b", "PASSED x.py::test_c"],
            "test_c (not expected)",
        ),
    ],
)
async def test_any_difference_is_unsolved(
    with_spec: Callable[..., Task], lines: list[str], said: str
) -> None:
    result = await grade(with_spec, *lines)
    assert result.verdict is Verdict.UNSOLVED
    assert said in result.reason


async def test_task_without_a_record_is_invalid(with_spec: Callable[..., Task]) -> None:
    assert (await grade(with_spec, expected={})).verdict is Verdict.INVALID
