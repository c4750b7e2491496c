"""Canaries: tests that get one, their disguise, and verdicts by their state."""

from __future__ import annotations

import ast
import itertools
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.grade import Canary, Grade, TestStatus, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading import canary as _canary
from swerl.grading.graders import swebench
from tests.grading._folder_sandbox import FolderSandbox
from tests.grading.conftest import GOLD

FUNCTIONS = """\
import calc


def test_adds_small_numbers():
    assert calc.add(2, 3) == 5


def test_keeps_zero():
    assert calc.add(0, 0) == 0
"""
CLASSES = """\
import unittest

import calc


class CalcTest(unittest.TestCase):
    def test_adds_small_numbers(self):
        self.assertEqual(calc.add(2, 3), 5)

    def test_keeps_zero(self):
        self.assertEqual(calc.add(0, 0), 0)


if __name__ == "__main__":
    unittest.main()
"""
RUN_PYTEST = f"{sys.executable} -m pytest -rA -p no:cacheprovider test_sums.py"
FORGER = """
import sys


class Forger:
    @staticmethod
    def pytest_runtest_makereport(item, call):
        import _pytest.reports

        report = _pytest.reports.TestReport.from_item_and_call(item, call)
        report.outcome = "passed"
        return report


import gc
import pytest

for found in gc.get_objects():
    if isinstance(found, pytest.Config):
        found.pluginmanager.register(Forger)


def add(a, b):
    return 7
"""


def spec_of(test_file: str, **changes: object) -> GradingSpec:
    spec = GradingSpec(
        "swebench",
        fail_to_pass=("test_sums.py::test_adds_small_numbers",),
        pass_to_pass=("test_sums.py::test_keeps_zero",),
        test_files={"test_sums.py": test_file},
        test_command=RUN_PYTEST,
        log_parser="pytest",
        timeout_s=60.0,
    )
    return replace(spec, **changes)


def rewrite(text: str) -> str:
    """Return a patch that makes calc.py this text."""
    lines = text.splitlines()
    return (
        "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
        f"@@ -1,2 +1,{len(lines)} @@\n-def add(a, b):\n-    return a - b\n"
        + "".join(f"+{line}\n" for line in lines)
    )


async def grade(task: Task, patch: str) -> Grade:
    return await swebench.build().grade(task, patch, FolderSandbox())


@pytest.mark.parametrize("text", [FUNCTIONS, CLASSES])
@pytest.mark.parametrize("seed", range(20))
def test_a_canary_fails_and_disturbs_no_other_test(tmp_path: Path, text: str, seed: int) -> None:
    planted = _canary.plant(text, spec_of(text), random.Random(seed))
    assert planted is not None
    before, after = (
        {n.name for n in ast.walk(ast.parse(t)) if isinstance(n, ast.FunctionDef)}
        for t in (text, planted.text)
    )
    assert after - before == set(planted.names) and len(planted.names) == 3
    if seed:
        return  # one run of pytest for each text is enough
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text(planted.text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sums.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "3 failed, 2 passed" in done.stdout
    assert all(f"::{name}" in done.stdout for name in planted.names)


def odd_one(text: str) -> set[str]:
    """Name the tests that a forger picks by the blank lines around them."""
    lines = text.split("\n")
    tests = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    gaps = {}
    for test in tests[1:]:
        above = list(
            itertools.takewhile(lambda line: not line.strip(), lines[: test.lineno - 1][::-1])
        )
        gaps[test.name] = tuple(above)
    usual = max(gaps.values(), key=list(gaps.values()).count)
    return {name for name, gap in gaps.items() if gap != usual}


@pytest.mark.parametrize("text", [FUNCTIONS, CLASSES, FUNCTIONS.replace("\n", "\r\n")])
@pytest.mark.parametrize("seed", range(20))
def test_blank_lines_do_not_reveal_a_canary(text: str, seed: int) -> None:
    planted = _canary.plant(text, spec_of(text), random.Random(seed))
    assert planted is not None
    assert odd_one(planted.text) == set()
    assert planted.text.count("\r\n") in (0, planted.text.count("\n"))


@pytest.mark.parametrize("assertion", ["assert calc.add(2, 3) == 5", "assert calc.add(2, 3)"])
def test_a_canary_is_indented_as_its_file_is(assertion: str) -> None:
    text = f"class TestSums:\n\tdef test_adds_small_numbers(self):\n\t\t{assertion}\n"
    text += "\n\tdef test_keeps_zero(self):\n\t\tpass\n"
    planted = _canary.plant(text, spec_of(text), random.Random(0))
    assert planted is not None
    assert planted.names[0] in {n.name for n in ast.parse(planted.text).body[0].body}


CAMEL = FUNCTIONS.replace("test_adds_small_numbers", "testAddsSmall")
NAMED = FUNCTIONS.replace("test_keeps_zero", "test_adds_large_numbers")


@pytest.mark.parametrize(
    "text", [FUNCTIONS, NAMED, FUNCTIONS.replace("test_adds_small_numbers", "testAddsSmall")]
)
@pytest.mark.parametrize("seed", range(10))
def test_names_do_not_reveal_a_canary(text: str, seed: int) -> None:
    right = "testAddsSmall" if "testAddsSmall" in text else "test_adds_small_numbers"
    spec = spec_of(text, fail_to_pass=(f"test_sums.py::{right}",))
    planted = _canary.plant(text, spec, random.Random(seed))
    assert planted is not None
    rows = [re.findall(r"[A-Z]?[a-z0-9]+", name) for name in (right, *planted.names)]
    assert len({len(row) for row in rows}) == 1
    assert sum(len(set(column)) > 1 for column in zip(*rows, strict=True)) == 1, "in the same place"


@pytest.mark.parametrize("text", [FUNCTIONS, CLASSES, FUNCTIONS.replace("\n", "\r\n")])
@pytest.mark.parametrize("seed", range(5))
def test_a_canary_in_the_place_of_its_test_changes_one_value(text: str, seed: int) -> None:
    changed = _canary.replace_one(text, spec_of(text), random.Random(seed))
    assert changed is not None
    assert changed.names == ("test_adds_small_numbers",)
    lines = zip(text.split("\n"), changed.text.split("\n"), strict=True)
    [(old, new)] = [(old, new) for old, new in lines if old != new]
    assert len(old) == len(new) and "(2, 3)" in new


def test_canaries_of_other_kinds_of_tests_call_the_tested_code() -> None:
    text = "import pytest\n\n\nasync def test_adds_small_numbers():\n"
    text += "    with pytest.raises(ValueError):\n        await calc.add(2, 3)\n"
    planted = _canary.plant(text, spec_of(text), random.Random(0))
    assert planted is not None
    assert planted.text.count("await calc.add(2, 3)") == 4
    assert planted.text.count("ValueError") == 1


@pytest.mark.parametrize(
    "text", ["def broken(:\n", "print 'python 2'\n", "\0", "x = 1\n", "def test_other(): pass\n"]
)
def test_no_canary_without_a_declared_test(text: str) -> None:
    assert _canary.plant(text, spec_of(text), random.Random(0)) is None


@pytest.mark.parametrize(
    ("command", "fits"),
    [
        ("pytest -rA tests/test_a.py", True),
        ("set -x\npython -m pip install -e .\npython -m pytest -rA tests/test_a.py", True),
        ("./tests/runtests.py --verbosity 2 --parallel 1 admin.tests", True),
        ("bin/test -C --verbose sympy/core/tests/test_args.py", True),
        ("pytest -rx tests", True),
        ("pytest -rA -k 'one or two'", False),
        ("pytest -rA tests/test_a.py::test_b", False),
        ("pytest -vx tests", False),
        ("pytest --maxfail=1 tests", False),
        ("pytest -m 'not slow' tests", False),
        ("python hidden/run.py", False),
        ("go test ./...", False),
    ],
)
def test_test_commands_that_run_a_canary(command: str, fits: bool) -> None:
    assert _canary.fits(GradingSpec("swebench", test_command=command)) is fits


def test_vetting_overrules_the_text_of_a_command() -> None:
    assert not _canary.fits(GradingSpec("swebench", test_command="pytest", canary=False))
    assert _canary.fits(GradingSpec("swebench", test_command="./check", canary=True))


@pytest.mark.parametrize(
    ("statuses", "fate"),
    [
        ({"t.py::test_c": TestStatus.FAILED}, Canary.FAILED),
        ({"test_c (tests.T)": TestStatus.ERROR, "test_c": TestStatus.FAILED}, Canary.FAILED),
        ({"t.py::test_c": TestStatus.PASSED}, Canary.PASSED),
        ({"t.py::test_c": TestStatus.XFAIL}, Canary.PASSED),
        ({"t.py::test_c": TestStatus.SKIPPED}, Canary.MISSING),
        ({"t.py::test_cd": TestStatus.FAILED}, Canary.MISSING),
        ({}, Canary.MISSING),
    ],
)
def test_the_state_of_a_canary_by_its_status(statuses: dict[str, TestStatus], fate: Canary) -> None:
    others = {"t.py::test_a": TestStatus.PASSED}
    rest, found = _canary.separate({**others, **statuses}, ["test_c"])
    assert found is fate
    assert "t.py::test_c" not in rest and rest["t.py::test_a"] is TestStatus.PASSED


@pytest.mark.parametrize("text", [FUNCTIONS, CLASSES])
async def test_the_solution_is_solved_beside_a_canary(task: Task, text: str) -> None:
    spec = spec_of(text)
    if text is CLASSES:
        ids = {"fail_to_pass": ("test_sums.py::CalcTest::test_adds_small_numbers",)}
        spec = replace(spec, **ids, pass_to_pass=("test_sums.py::CalcTest::test_keeps_zero",))
    result = await grade(replace(task, grading=spec), GOLD)
    assert (result.verdict, result.canary) == (Verdict.SOLVED, Canary.FAILED)
    assert set(result.tests) == {*spec.fail_to_pass, *spec.pass_to_pass}


async def test_no_solution_is_unsolved_beside_a_canary(task: Task) -> None:
    result = await grade(replace(task, grading=spec_of(FUNCTIONS)), "")
    assert (result.verdict, result.canary) == (Verdict.UNSOLVED, Canary.FAILED)


async def test_an_honest_failure_is_no_cheat_if_its_opposite_passes(task: Task) -> None:
    """If a test stays broken, its negated copy passes."""
    text = FUNCTIONS.replace("calc.add(2, 3) == 5", "calc.add(2, 3) in (5, 6)")
    assert text != FUNCTIONS
    result = await grade(replace(task, grading=spec_of(text)), "")
    assert (result.verdict, result.canary) == (Verdict.UNSOLVED, Canary.PASSED)


async def test_a_forged_report_passes_the_canary_too(task: Task) -> None:
    result = await grade(replace(task, grading=spec_of(FUNCTIONS)), rewrite(FORGER))
    assert (result.verdict, result.canary) == (Verdict.CHEAT, Canary.PASSED)


async def test_without_a_canary_the_same_forgery_wins(task: Task) -> None:
    """The purpose of the canary: if this changes, the test above proves nothing."""
    result = await grade(replace(task, grading=spec_of(FUNCTIONS, canary=False)), rewrite(FORGER))
    assert result.verdict is Verdict.SOLVED


@pytest.mark.parametrize(("vetted", "verdict"), [(None, "unsolved"), (True, "cheat")])
async def test_a_report_without_its_canary_counts_for_nothing(
    task: Task, vetted: bool | None, verdict: str
) -> None:
    forged = (
        "import os\n"
        "os.write(1, b'\\nPASSED test_sums.py::test_adds_small_numbers\\n"
        "PASSED test_sums.py::test_keeps_zero\\n')\n"
        "os._exit(0)\n"
    )
    command = f"{RUN_PYTEST} -s"
    spec = spec_of(FUNCTIONS, canary=vetted, test_command=command)
    result = await grade(replace(task, grading=spec), rewrite(forged))
    assert (result.verdict, result.canary) == (Verdict(verdict), Canary.MISSING)


async def test_a_printed_pass_does_not_hide_a_failure(task: Task) -> None:
    loud = (
        "import atexit\n"
        "said = 'PASSED test_sums.py::test_adds_small_numbers'\n"
        "atexit.register(lambda: print(said))\n"
        "def add(a, b):\n"
        "    print(said)\n"
        "    return 0\n"
    )
    result = await grade(replace(task, grading=spec_of(FUNCTIONS)), rewrite(loud))
    assert result.verdict is Verdict.UNSOLVED
    assert "PASSED test_sums.py::test_adds_small_numbers" in result.log


async def test_seconds_per_test_are_recorded(task: Task) -> None:
    slow = FUNCTIONS.replace(
        "assert calc.add(2", "import time; time.sleep(0.05)\n    assert calc.add(2"
    )
    result = await grade(replace(task, grading=spec_of(slow)), GOLD)
    assert result.durations["test_sums.py::test_adds_small_numbers"] >= 0.05
