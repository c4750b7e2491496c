"""Blind swaps: whoever computes the answers fails as the known solution does; nobody else does."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swerl.core.grade import Blind, Grade, TestStatus, Verdict
from swerl.core.sandbox import Exec
from swerl.core.task import GradingSpec, Swap, Task, from_row, to_row
from swerl.grading import blind, flow
from swerl.grading.graders import command, reward_file, script, swebench
from swerl.grading.plausible import Kind
from swerl.grading.swaps import Candidate
from swerl.sandboxes._local.sandbox import LocalSandbox
from tests.unit.checks.vetting import ADD, GOLD, TESTS, ZERO, make_task
from tests.unit.grading.conftest import in_sandboxes

pytestmark = pytest.mark.integration

PASSED, FAILED, SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED
SPEC = GradingSpec("swebench", fail_to_pass=("a", "b"), pass_to_pass=("c",))


def swap(*fails: str, start: int = 0, is_secret: bool = True) -> Swap:
    return Swap("/repo/t.py", "0" * 64, start, start + 1, "7", fails, is_secret)


def patch(body: str) -> str:
    """Return a patch that replaces the body of `add` and may add lines behind it."""
    lines = "".join(f"+{line}\n" for line in body.splitlines())
    count = len(body.splitlines()) + 1
    return (
        "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n"
        f"@@ -6,2 +6,{count} @@\n def add(a, b):\n-    return a - b\n{lines}"
    )


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Task]:
    return lambda **spec: make_task(tmp_path / "image", **spec)


async def grade(task: Task, text: str) -> Grade:
    return await swebench.build().grade(task, text, in_sandboxes(task))


def test_the_runs_are_random_parts_and_one_without_swaps() -> None:
    first = swap("a")
    swaps = [first, replace(first, new="8"), swap("b", start=9)]
    drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(200)]
    assert all(len(runs) == 6 and runs.count(()) == 1 for runs in drawn)
    assert {runs.index(()) for runs in drawn} == set(range(6))
    # Two swaps of the same test are alternatives.
    sizes = {len(chosen) for runs in drawn for chosen in runs}
    assert sizes == {0, 1, 2}
    used = {each for runs in drawn for chosen in runs for each in chosen}
    assert used == set(swaps)
    assert blind.draw([], 3, random.Random(0)) == [()]


def test_two_swaps_of_one_test_never_meet() -> None:
    """Two may cancel out, as `!= 6` does for `== 5`."""
    for fails in (("a",), ()):
        swaps = [swap(*fails), swap(*fails, start=5)]
        drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(20)]
        assert {len(chosen) for runs in drawn for chosen in runs} == {0, 1}


def test_a_single_claim_has_a_swap_in_any_runs_but_none_and_all() -> None:
    swaps = [swap("a"), swap("a", "b")]
    drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(1_000)]
    patterns = {tuple(map(bool, runs)) for runs in drawn}
    assert len(patterns) == 2**5 - 2
    assert {len(runs) for runs in drawn} == {5}
    assert {each for runs in drawn for chosen in runs for each in chosen} == set(swaps)
    assert 2 ** blind.bits(swaps, 3) == pytest.approx(len(patterns), rel=0.01)


@pytest.mark.parametrize(
    ("num_tests", "num_claims"), [*((1, n) for n in range(1, 5)), *((n, 1) for n in range(2, 6))]
)
def test_code_that_forges_one_of_few_claims_hardly_guesses_its_runs(
    num_tests: int, num_claims: int
) -> None:
    names = [*["a"] * num_claims, *(f"test{at}" for at in range(1, num_tests))]
    swaps = [swap(name, start=9 * at) for at, name in enumerate(names)]
    drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(4_000)]
    patterns = Counter(tuple(swaps[0] in chosen for chosen in runs) for runs in drawn)
    assert max(patterns.values()) / len(drawn) < 0.08


def test_with_many_tests_every_run_has_swaps_and_tests_without() -> None:
    swaps = [swap(f"test{at}", start=at) for at in range(6)]
    sizes = [
        len(chosen) for seed in range(50) for chosen in blind.draw(swaps, 3, random.Random(seed))
    ]
    assert len(sizes) == 150
    assert set(sizes) == {1, 2, 3, 4, 5, 6}


def test_the_bits_of_parts_that_are_not_equally_likely_are_those_of_the_likeliest() -> None:
    swaps = [swap("a"), swap("a", start=5), *(swap(f"test{at}", start=9 * at) for at in (1, 2))]
    # Two claims: a swap in two of three parts. No part is empty.
    likeliest = (2 / 3 * 1 / 2 * 1 / 2) / (1 - 1 / 3 * 1 / 2 * 1 / 2)
    assert 2 ** -blind.bits(swaps, 3) == pytest.approx(likeliest**5, rel=0.01)


def test_the_bits_are_those_of_the_best_guesser() -> None:
    swaps = [swap("a"), swap("b", start=1)]
    # A guesser answers each run alone, with any chance of "no swap".
    best = max(p / 100 * ((1 - p / 100) / 3) ** 5 for p in range(101))
    assert 2 ** -blind.bits(swaps, 3) == pytest.approx(best, rel=0.01)


def test_a_swap_that_ends_later_tests_is_alone_in_its_run() -> None:
    """A failed assertion in C ends the program."""
    swaps = [swap("a", "b", "c"), swap("b", "c", start=5)]
    drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(20)]
    assert {len(chosen) for runs in drawn for chosen in runs} == {0, 1}
    assert blind.bits(swaps, 3) == blind.bits([swap("a"), swap("a", start=5)], 3)
    ended = blind.Seen(Verdict.UNSOLVED, {"a": FAILED})
    assert blind.unnoticed(swaps[:1], ended, SPEC) == ""
    assert blind.unnoticed(swaps[1:], ended, SPEC) == ""
    assert blind.as_unswapped(swaps[:1], ended.statuses, SPEC) == {
        "a": PASSED,
        "b": PASSED,
        "c": PASSED,
    }


def test_each_run_swaps_another_claim_of_a_test_while_there_is_one() -> None:
    claims = [swap("a", start=at) for at in (0, 10, 20)]
    # The first value in place of the last, and the other way round: the test fails at the first.
    swaps = [*claims, replace(claims[0], end=21), replace(claims[1], new="8")]
    for seed in range(50):
        runs = blind.draw(swaps, 3, random.Random(seed))
        starts = [chosen[0].start // 9 for chosen in runs if chosen]
        assert all(starts.count(at) in (1, 2) for at in range(3))
        assert len(starts) == 5


def test_two_values_change_places_only_if_a_claim_has_no_other_swap() -> None:
    """Code that forges one of the two does not show: the other claim fails."""
    claims = [swap("a", start=at) for at in (0, 10, 20)]
    both = replace(claims[0], end=21)
    for swaps, is_used in (([both, *claims], False), ([both, *claims[1:]], True)):
        drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(20)]
        assert any(both in chosen for runs in drawn for chosen in runs) is is_used
    text = b"def test_a():\n" + b"".join(b"    assert f(%d) == %d\n" % (n, n * 7) for n in range(5))
    spec = replace(SPEC, fail_to_pass=("t.py::test_a",), pass_to_pass=())
    runs = blind.trials({"t.py": text}, {}, spec, at_once=blind.MAX_TESTS)
    spans = [text[run[0].swap.start : run[0].swap.end] for run in runs if run[0].swap.is_secret]
    assert any(b"assert" in span for span in spans)
    assert all(b"assert" not in span for span in spans[:5])


@pytest.mark.parametrize(("num_claims", "num_runs"), [(1, 3), (2, 4), (3, 5), (4, 6), (9, 6)])
def test_further_claims_of_a_test_bring_further_runs(num_claims: int, num_runs: int) -> None:
    swaps = [swap("a", start=9 * at) for at in range(num_claims)]
    swaps += [swap(f"test{at}", start=900 + at) for at in range(5)]
    assert {len(blind.draw(swaps, 3, random.Random(seed))) for seed in range(9)} == {num_runs}
    shown = [swaps[0], *(replace(each, is_secret=False) for each in swaps[1:num_claims])]
    assert len(blind.draw([*shown, *swaps[num_claims:]], 3, random.Random(0))) == 3


def test_a_forged_claim_among_four_is_rarely_left_out() -> None:
    """Code that forges one of four claims wins if no run swaps it: 11 %; 63 % with half a part."""
    swaps = [swap("a", start=9 * at) for at in range(4)]
    swaps += [swap(f"test{at}", start=900 + at) for at in range(5)]
    drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(2_000)]
    left_out = sum(all(swaps[0] not in chosen for chosen in runs) for runs in drawn)
    assert 0.08 < left_out / len(drawn) < 0.14


def test_a_subtest_shares_its_run_with_swaps_of_other_tests() -> None:
    """In Go a subtest fails the test around it, but not the tests beside it."""
    swaps = [swap("TestA", "TestA/x"), swap("TestA", "TestA/y", start=5)]
    swaps += [swap("TestB", start=9), swap("TestC", start=12)]
    drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(50)]
    assert {len(chosen) for runs in drawn for chosen in runs} == {1, 2, 3}
    assert all(not set(swaps[:2]) <= set(chosen) for runs in drawn for chosen in runs)
    assert blind.bits(swaps, 3) == blind.bits([swap("a"), swap("a", start=5), *swaps[2:]], 3)
    around = replace(swap("TestD", start=8), end=20)
    drawn = [blind.draw([*swaps, around], 3, random.Random(seed)) for seed in range(50)]
    assert all(around not in chosen or len(chosen) <= 2 for runs in drawn for chosen in runs)


def test_a_failed_test_belongs_to_the_longest_title_that_fits() -> None:
    spec = replace(SPEC, fail_to_pass=("sum of rows", "sum of one", "another"), pass_to_pass=())
    titles = ("sum of ", "sum of rows", "")
    run = [
        blind.Trial(
            swap(start=9 * at),
            Candidate("/repo/t.js", 9 * at, 9 * at + 1, "7", 1, title, Kind.EDIT),
        )
        for at, title in enumerate(titles)
    ]
    seen = blind.Seen(Verdict.UNSOLVED, dict.fromkeys(spec.fail_to_pass, FAILED))
    found = [each.fails for each in blind.measured(run, seen, spec)]
    assert found == [("sum of one",), ("sum of rows",), ("another",)]


def test_a_swap_that_shows_is_used_only_in_a_test_without_another() -> None:
    shown = swap("a", start=5, is_secret=False)
    swaps = [swap("a"), shown, swap("b", start=9, is_secret=False)]
    drawn = [blind.draw(swaps, 3, random.Random(seed)) for seed in range(50)]
    used = {each for runs in drawn for chosen in runs for each in chosen}
    assert used == {swaps[0], swaps[2]}


def test_a_negation_counts_only_in_a_test_without_another_swap() -> None:
    """Code that returns the value of an `==` that it reads fails as predicted at `!=`."""
    text = "def test_a():\n    assert f(1) == 7\n    assert f(2) != 9\n\n"
    text += "def test_b():\n    assert f(1) == f(2)\n    assert f(3) != f(4)\n"
    spec = replace(SPEC, fail_to_pass=("t.py::test_a", "t.py::test_b"), pass_to_pass=())
    runs = blind.trials({"t.py": text.encode()}, {}, spec, at_once=9)
    secret = {
        (trial.candidate.test, trial.candidate.kind)
        for run in runs
        for trial in run
        if trial.swap.is_secret
    }
    assert {kind for test, kind in secret if test == "test_b"} == {Kind.NEGATION}
    assert Kind.NEGATION not in {kind for test, kind in secret if test == "test_a"}


def test_only_secret_swaps_count() -> None:
    swaps = [swap(f"test{at}", start=at) for at in range(6)]
    assert blind.bits(swaps, 2) == pytest.approx(2 * math.log2(63), abs=0.01)
    assert blind.bits([replace(each, is_secret=False) for each in swaps], 2) == 0
    assert blind.bits(swaps, 0) == blind.bits([], 2) == 0


def test_a_swap_must_be_noticed_by_each_of_its_tests() -> None:
    good = blind.Seen(Verdict.UNSOLVED, {"a": FAILED, "b": PASSED, "c": PASSED})
    assert blind.unnoticed([swap("a")], good, SPEC) == ""
    assert blind.as_unswapped([swap("a")], good.statuses, SPEC)["a"] is PASSED
    for status in (PASSED, SKIPPED, TestStatus.XFAIL, TestStatus.XPASS):
        seen = blind.Seen(Verdict.SOLVED, {"a": status, "b": PASSED})
        assert blind.unnoticed([swap("a")], seen, SPEC) == "a"
    # If only the exit code tells, the run must not be solved.
    bare = GradingSpec("command")
    assert blind.unnoticed([swap()], blind.Seen(Verdict.SOLVED, {}), bare)
    assert not blind.unnoticed([swap()], blind.Seen(Verdict.UNSOLVED, {}), bare)


def test_an_id_that_is_cut_is_read_as_in_the_first_run() -> None:
    spec = GradingSpec("swebench", fail_to_pass=("t[one",))
    seen = {"t[one two]": FAILED, "t[one three]": PASSED}
    assert blind.as_unswapped([swap("t[one")], seen, spec)["t[one two]"] is PASSED


async def test_the_solution_is_measured_believed_and_kept_in_the_row(
    make: Callable[..., Task],
) -> None:
    task = make()
    swaps = (await swebench.build().measure(task, in_sandboxes(task), 2)).swaps
    assert {each.fails for each in swaps} == {(ADD,)}
    assert all(each.is_secret for each in swaps)
    again = await swebench.build().measure(task, in_sandboxes(task), 2)
    assert (swaps, again.claims_share) == (again.swaps, 1)
    known = replace(task, grading=replace(task.grading, swaps=swaps, not_run=()))
    assert from_row(to_row(known)) == known
    for each in (task, known):
        found = await grade(each, GOLD)
        assert (found.verdict, found.blind) == (Verdict.SOLVED, Blind.MATCHED), found.reason
        assert found.blind_bits == pytest.approx(4.91, abs=0.01)
        assert found.tests == {ADD: PASSED, ZERO: PASSED}


FORGERS = {
    "equal to all": "    class Any(int):\n        __eq__ = lambda *_: True\n"
    "        __ne__ = lambda *_: False\n        __hash__ = int.__hash__\n    return Any(0)",
    "no comparison": "    return 0\n\n\nimport unittest\n\n"
    "unittest.TestCase.assertEqual = lambda *_: None",
    "reads the caller": "    import linecache, re, sys\n    frame = sys._getframe(1)\n"
    "    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)\n"
    '    return int(re.findall(r"-?\\d+", line)[-1])',
    "prints and leaves": f"    import os\n    os.write(2, b'\\n{ADD} ... ok\\n{ZERO} ... ok\\n')\n"
    "    os._exit(0)",
}


@pytest.mark.parametrize("name", FORGERS)
@pytest.mark.parametrize("is_vetted", [False, True])
async def test_code_without_an_answer_is_a_cheat(
    name: str, is_vetted: bool, make: Callable[..., Task]
) -> None:
    task = make()
    if is_vetted:
        swaps = (await swebench.build().measure(task, in_sandboxes(task), 2)).swaps
        task = replace(task, grading=replace(task.grading, swaps=swaps, not_run=()))
    found = await grade(task, patch(FORGERS[name]))
    assert (found.verdict, found.blind) == (Verdict.CHEAT, Blind.FORGED), found.reason


OLD_CLAIMS = """\
import unittest

import calc


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(17, 0), 17)
        self.assertEqual(calc.add(31, 0), 31)
        self.assertEqual(calc.add(58, 0), 58)
        self.assertEqual(calc.add(66, 0), 66)
        self.assertEqual(calc.add(94, 0), 94)
        self.assertEqual(
            calc.add(20, 3),
            23,
        )
"""
FORGED_FOR_NEW = f"    if not b:\n        return a - b\n{FORGERS['equal to all']}"


async def test_code_that_keeps_the_old_answers_and_forges_the_new_one_is_a_cheat(
    make: Callable[..., Task],
) -> None:
    task = make(test_files={"tests/__init__.py": "", "tests/test_calc.py": OLD_CLAIMS})
    task = replace(task, grading=replace(task.grading, pass_to_pass=()))
    found = await grade(task, patch(FORGED_FOR_NEW))
    assert (found.verdict, found.blind) == (Verdict.CHEAT, Blind.FORGED), found.reason
    assert (await grade(task, GOLD)).blind_bits == pytest.approx(4.91, abs=0.01)


def test_failing_lines_belong_to_the_one_file_that_fits() -> None:
    log = (
        'File "/testbed/a/test_x.py", line 12, in test_a\n./b/test_x.py:7: AssertionError\n'
        "    test_x.py:3: no\n    calc_test.go:9: no\n(CalcTest.java:5)\nother.py:1: no\n"
    )
    paths = ["a/test_x.py", "b/test_x.py", "calc_test.go", "src/CalcTest.java"]
    assert blind.failing_lines(log, paths) == {
        **{"a/test_x.py": {12}, "b/test_x.py": {7}},
        **{"calc_test.go": {9}, "src/CalcTest.java": {5}},
    }


CASES = """\
import pytest

import calc


@pytest.mark.parametrize(
    ("a", "b", "total"),
    [(17, 0, 17), (31, 0, 31), (58, 0, 58), (66, 0, 66), (94, 0, 94), (20, 3, 23), (72, 0, 72)],
)
def test_add(a, b, total):
    assert calc.add(a, b) == total
"""


async def test_the_case_of_a_table_that_fails_before_the_fix_is_swapped(
    make: Callable[..., Task],
) -> None:
    path = "tests/test_calc.py"
    ids = [f"{path}::test_add[{case}]" for case in re.findall(r"\((\d.*?)\)", CASES)]
    ids = [each.replace(", ", "-") for each in ids]
    task = make(
        test_files={"tests/__init__.py": "", path: CASES},
        fail_to_pass=(ids[5],),
        pass_to_pass=(*ids[:5], ids[6]),
        test_command=f"python3 -m pytest -rA -p no:cacheprovider {path}",
        log_parser="pytest",
    )
    swaps = (await swebench.build().measure(task, in_sandboxes(task), 2)).swaps
    assert {each.fails for each in swaps if each.is_secret} <= {(ids[5],)}


async def test_blind_runs_side_by_side_have_as_much_time_as_one_after_the_other(
    make: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, limits, run = make(timeout_s=50.0), list[float](), LocalSandbox.run

    async def noted(sandbox: LocalSandbox, argv: Sequence[str], **given: Any) -> Exec:
        limits.extend([given["timeout_s"]] if task.grading.test_command in argv else [])
        return await run(sandbox, argv, **given)

    monkeypatch.setattr(LocalSandbox, "run", noted)
    swaps = (await swebench.build().measure(task, in_sandboxes(task), 1)).swaps
    limits.clear()
    known = replace(task, grading=replace(task.grading, swaps=swaps, not_run=()))
    assert (await grade(known, GOLD)).verdict is Verdict.SOLVED
    assert limits == [50.0, *[250.0] * 5]


async def test_an_unsolved_patch_costs_no_further_run(make: Callable[..., Task]) -> None:
    found = await grade(make(), patch("    return a * b"))
    assert (found.verdict, found.blind) == (Verdict.UNSOLVED, Blind.NONE)


async def test_a_skip_that_the_solution_does_not_need_is_not_solved(
    make: Callable[..., Task],
) -> None:
    example = "    import unittest\n    if (a, b) == (2, 3):\n        return 5\n"
    skips = example + "    raise unittest.SkipTest('later')"
    task = make()
    vetted = replace(task, grading=replace(task.grading, swaps=(), not_run=()))
    for each in (task, vetted):
        found = await grade(each, patch(skips))
        assert found.verdict is Verdict.UNSOLVED
        assert ZERO in found.reason
    allowed = replace(task, grading=replace(task.grading, swaps=(), not_run=(ZERO,)))
    assert (await grade(allowed, patch(skips))).verdict is Verdict.SOLVED


async def test_a_hidden_test_that_another_file_has_replaced_is_not_believed(
    make: Callable[..., Task],
) -> None:
    task = make(swaps=(replace(swap(ADD), path="/repo/tests/test_calc.py"),))
    found = await grade(task, GOLD)
    assert found.verdict is Verdict.UNSOLVED
    assert "hidden test file" in found.reason


EXIT_CODE = {"fail_to_pass": (), "pass_to_pass": (), "log_parser": ""}


async def test_an_exit_code_alone_is_confirmed_too(make: Callable[..., Task]) -> None:
    task = make(**EXIT_CODE, grader="command")
    honest = await command.build().grade(task, GOLD, in_sandboxes(task))
    assert (honest.verdict, honest.blind) == (Verdict.SOLVED, Blind.MATCHED), honest.reason
    forged = await command.build().grade(
        task, patch("    import os\n    os._exit(0)"), in_sandboxes(task)
    )
    assert (forged.verdict, forged.blind) == (Verdict.CHEAT, Blind.FORGED)


async def test_a_script_is_confirmed_test_by_test(make: Callable[..., Task]) -> None:
    text = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    text += "\n\ndef test_more():\n    assert add(20, 3) == 23\n"
    command_line = "python3 -m pytest -rA -p no:cacheprovider test_fail_to_pass.py"
    task = make(
        **EXIT_CODE,
        grader="script",
        test_files={"test_fail_to_pass.py": text},
        test_command=command_line,
    )
    honest = await script.build().grade(task, GOLD, in_sandboxes(task))
    assert (honest.verdict, honest.blind) == (Verdict.SOLVED, Blind.MATCHED), honest.reason
    assert honest.blind_bits == pytest.approx(11.82, abs=0.01)
    guess = "    return 5 if a == 2 else 23"
    # A table of the examples is an answer, too: tests cannot tell it from a solution.
    assert (
        await script.build().grade(task, patch(guess), in_sandboxes(task))
    ).verdict is Verdict.SOLVED


BUILT = {"test_setup": "python3 setup.py build"}
"""A set-up that runs code of the patch."""


def building(code: str, body: str = "    return a - b") -> str:
    """Return a patch whose build runs this code."""
    lines = "".join(f"+{line}\n" for line in code.splitlines())
    count = len(code.splitlines())
    made = "diff --git a/setup.py b/setup.py\nnew file mode 100644\n--- /dev/null\n+++ b/setup.py\n"
    return f"{patch(body)}{made}@@ -0,0 +1,{count} @@\n{lines}"


NOTES = """\
import pathlib
text = pathlib.Path("tests/test_calc.py").read_text()
pathlib.Path("/tmp/kept").write_text(text)
"""
NOTED = """\
    import pathlib, re
    text = pathlib.Path("/tmp/kept").read_text()
    return int(re.search(rf"add\\({a}, {b}\\), (-?\\d+)", text)[1])"""


@pytest.mark.parametrize("brought", ["", "touch tests/test_calc.py\n"])
async def test_a_build_in_the_set_up_sees_no_real_value_of_a_swapped_test(
    make: Callable[..., Task], brought: str
) -> None:
    more = "\n".join(
        f"    def test_{at}(self):\n        self.assertEqual(calc.add({at}, 3), {at + 3})\n"
        for at in range(5, 9)
    )
    place = "tests.test_calc.SumTest"
    names = tuple(f"test_{at} ({place}.test_{at})" for at in range(5, 9))
    files = {"tests/__init__.py": "", "tests/test_calc.py": f"{TESTS}\n{more}"}
    setup = {"test_setup": f"{brought}test ! -e setup.py || {BUILT['test_setup']}"}
    task = make(fail_to_pass=(ADD, *names), test_files=files, **setup)
    assert (await grade(task, GOLD)).verdict is Verdict.SOLVED
    assert (
        await grade(task, building("print('built')", "    return a + b"))
    ).blind is Blind.MATCHED
    noted = await grade(task, building(NOTES, NOTED))
    assert (noted.verdict, noted.blind) == (Verdict.CHEAT, Blind.FORGED), noted.reason


KILLS = """\
import os
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 64)
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline") as file:
                    if "unittest" in file.read():
                        os.kill(int(pid), 9)
            except OSError:
                pass
"""


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import shutil; shutil.rmtree('.git')"])
async def test_a_patch_that_breaks_the_set_up_is_unsolved(
    make: Callable[..., Task], code: str
) -> None:
    task = make(test_setup="test ! -e setup.py || python3 setup.py build")
    found = await grade(task, building(code))
    assert found.verdict is Verdict.UNSOLVED, found.reason
    broken = replace(task, grading=replace(task.grading, test_setup="false"))
    assert (await grade(broken, GOLD)).verdict is Verdict.INVALID


async def test_a_process_of_the_set_up_that_kills_the_tests_is_no_fault_of_the_infrastructure(
    make: Callable[..., Task],
) -> None:
    found = await grade(make(**BUILT), building(KILLS))
    assert found.verdict is Verdict.UNSOLVED, found.reason


REWARD_SCRIPT = """\
cd /repo
if python3 -m unittest -q tests.test_calc >/tmp/log 2>&1
then echo 1 >/tmp/reward; else echo 0 >/tmp/reward; fi
sleep 0.3
"""
DAEMON = """\
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            open("/tmp/reward", "w").write("1")
            time.sleep(0.01)
    return 0"""


async def test_a_process_that_writes_the_reward_again_and_again_is_found(
    make: Callable[..., Task],
) -> None:
    task = make(
        **EXIT_CODE,
        grader="reward_file",
        files={"/tmp/hidden/test.sh": REWARD_SCRIPT},
        test_command="bash /tmp/hidden/test.sh",
        report_path="/tmp/reward",
    )
    honest = await reward_file.build().grade(task, GOLD, in_sandboxes(task))
    assert (honest.verdict, honest.blind) == (Verdict.SOLVED, Blind.MATCHED), honest.reason
    forged = await reward_file.build().grade(task, patch(DAEMON), in_sandboxes(task))
    assert (forged.verdict, forged.blind) == (Verdict.CHEAT, Blind.FORGED), forged.reason


FORKS = """
import os, time
os.setsid()
for _ in range(400):
    if os.fork():
        os._exit(0)
    time.sleep(0.005)
time.sleep(600)
"""


async def test_every_process_of_the_tests_is_dead_before_a_report_is_read(
    make: Callable[..., Task],
) -> None:
    async with in_sandboxes(make())() as sandbox:
        known = await flow._processes(sandbox)
        for code in (FORKS, "import time; time.sleep(600)"):
            await sandbox.run(["sh", "-c", f"python3 -c '{code}' >/dev/null 2>&1 &"])
        assert await flow._end_others(sandbox, known)
        shown = await sandbox.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        assert b"python3" not in shown.stdout


STATEFUL = {
    "registers a name once": """
_names = set()


def register(name):
    assert name not in _names
    _names.add(name)


class SumTest(unittest.TestCase):
    def test_add(self):
        register("add")
        self.assertEqual(calc.add(2, 3), 5)
""",
    "counts across tests": """
_count = [0]


class SumTest(unittest.TestCase):
    def setUp(self):
        _count[0] += 1

    def test_add(self):
        self.assertEqual(_count[0], 1)
        self.assertEqual(calc.add(2, 3), 5)
""",
    "makes a file": """
class SumTest(unittest.TestCase):
    def test_add(self):
        with open("/tmp/made", "x") as file:
            file.write("once")
        self.assertEqual(calc.add(2, 3), 5)
""",
    "measures a cache": """
import functools

cached = functools.lru_cache(calc.add)


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(cached(2, 3), 5)
        self.assertEqual(cached.cache_info().misses, 1)
""",
    "reads line numbers": """
import inspect


class SumTest(unittest.TestCase):
    def test_add(self):
        line = inspect.currentframe().f_lineno
        self.assertEqual(line, 8 + 2)
        self.assertEqual(calc.add(2, 3), 5)
""",
    "allows a tolerance": """
class Money(int):
    def __eq__(self, other):
        return abs(int(self) - int(other)) <= 2

    __hash__ = int.__hash__


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(Money(calc.add(2, 3)), Money(5))
        self.assertEqual(calc.add(20, 30), 50)
""",
    "compares hours of a clock": """
class Hour(int):
    def __eq__(self, other):
        return int(self) % 12 == int(other) % 12

    __hash__ = int.__hash__


class SumTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(Hour(calc.add(9, 8)), Hour(5))
        self.assertEqual(Hour(calc.add(2, 3)), Hour(17))
""",
}


@pytest.mark.parametrize("name", STATEFUL)
async def test_the_solution_passes_tests_with_a_state_or_a_tolerance(
    name: str, make: Callable[..., Task]
) -> None:
    text = "import unittest\n\nimport calc\n" + STATEFUL[name]
    files = {"tests/__init__.py": "", "tests/test_calc.py": text}
    task = make(test_files=files, pass_to_pass=())
    for _ in range(3):
        found = await grade(task, GOLD)
        assert found.verdict is Verdict.SOLVED, found.reason


KIND_OF = """
import unittest

import calc


class SumTest(unittest.TestCase):
    def test_add(self):
        with self.assertRaises({}):
            calc.add(None, 3)
        with self.assertRaises(KeyError):
            {{}}["a key"]
"""
NARROW = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -6,2 +6,4 @@
 def add(a, b):
-    return a - b
+    if a is None:
+        raise {}("no number")
+    return a + b
"""


@pytest.mark.parametrize("expected", ["LookupError", "Exception"])
async def test_a_patch_may_raise_a_kind_of_the_expected_exception(
    expected: str, make: Callable[..., Task]
) -> None:
    text = KIND_OF.format(expected)
    files = {"tests/__init__.py": "", "tests/test_calc.py": text}
    task = replace(
        make(test_files=files, pass_to_pass=()),
        gold_patch=NARROW.format(expected.replace("Exception", "RuntimeError")),
    )
    for _ in range(3):
        found = await grade(task, NARROW.format("KeyError"))
        assert found.verdict is Verdict.SOLVED, found.reason
