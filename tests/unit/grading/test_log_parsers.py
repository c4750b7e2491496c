"""Each runner's log gives the statuses that its dataset uses."""

from __future__ import annotations

import pytest

from swerl.core.errors import UnknownNameError
from swerl.core.grade import TestStatus
from swerl.grading.log_parsers import PARSERS, find_parser

PASSED, FAILED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR
SKIPPED, XFAIL = TestStatus.SKIPPED, TestStatus.XFAIL

SUMMARY = """\
============ short test summary info ============
PASSED tests/a.py::test_one
FAILED tests/a.py::test_two - AssertionError: 1 - 2
ERROR tests/b.py::test_three - fixture 'x' not found
SKIPPED [1] tests/a.py:3: no network
XFAIL tests/a.py::test_four - known
PASSED tests/a.py::test_cut[x y]
====== 1 failed, 2 passed in 0.10s ======
"""


def test_pytest_summary() -> None:
    assert find_parser("pytest")(SUMMARY) == {
        "tests/a.py::test_one": PASSED,
        "tests/a.py::test_two": FAILED,
        "tests/b.py::test_three": ERROR,
        "tests/a.py::test_four": XFAIL,
        "tests/a.py::test_cut[x": PASSED,
    }


def test_a_printed_heading_neither_adds_nor_hides_a_failure() -> None:
    heading = SUMMARY.partition("\n")[0]
    found = find_parser("pytest")(f"{heading}\nFAILED to save\n{SUMMARY}")
    assert found == find_parser("pytest")(SUMMARY)
    forged = SUMMARY.replace("FAILED", "PASSED").replace("ERROR", "PASSED")
    assert find_parser("pytest")(SUMMARY + forged)["tests/a.py::test_two"] is FAILED


def test_a_line_behind_pytests_last_neither_adds_nor_hides_a_failure() -> None:
    read = find_parser("pytest")
    assert read(f"{SUMMARY}ERROR clean-up failed\nPASSED forged\n") == read(SUMMARY)
    assert read(f"{SUMMARY}FAILED tests/a.py::test_one\n")["tests/a.py::test_one"] is FAILED
    assert read(f"{SUMMARY}{SUMMARY.replace('two', 'six')}")["tests/a.py::test_six"] is FAILED


@pytest.mark.parametrize(
    ("name", "log"),
    [
        ("go_test", "half--- PASS: a (0.00s)\nhalf--- FAIL: b (0.00s)\n"),
        ("phpunit", "T (T)\nhalf ✔ a\nhalf ✘ b\n"),
        ("tap", "halfok 1 a\nhalfnot ok 2 b\nok 3 a book 12 long\n"),
    ],
)
def test_a_result_may_stand_behind_half_a_line(name: str, log: str) -> None:
    found = {test.rpartition("> ")[2]: end for test, end in find_parser(name)(log).items()}
    assert found.pop("a book 12 long", PASSED) is PASSED
    assert found == {"a": PASSED, "b": FAILED}


def test_a_result_of_unittest_may_stand_behind_printed_text() -> None:
    log = "test_a (t.T.test_a) ... half a lineok\ntest_b (t.T.test_b) ... half a lineFAIL\n"
    assert find_parser("django")(log) == {"test_a (t.T.test_a)": PASSED}


@pytest.mark.parametrize("name", ["pytest", "pytest_options", "pytest_coloured", "matplotlib"])
def test_worst_line_about_a_test_counts(name: str) -> None:
    log = "ERROR a.py::t - teardown\nPASSED a.py::t\n"
    assert find_parser(name)(log)["a.py::t"] is ERROR


@pytest.mark.parametrize(
    "line",
    [
        "(n=3) SUBFAIL tests/a.py::test_one - assert 6 == 9",
        "[two words] (n=3) SUBFAIL tests/a.py::test_one - assert 6 == 9",
        "SUBFAILED(n=3) tests/a.py::test_one - assert 6 == 9",
        "SUBFAILED[two words] (n=3) tests/a.py::test_one - assert 6 == 9",
    ],
)
@pytest.mark.parametrize("name", ["pytest", "pytest_options", "pytest_coloured", "r2e"])
def test_a_failed_subtest_fails_its_test(name: str, line: str) -> None:
    log = SUMMARY.replace("FAILED tests", f"{line}\nFAILED tests")
    test = "test_one" if name == "r2e" else "tests/a.py::test_one"
    assert find_parser(name)(SUMMARY)[test] is PASSED
    assert find_parser(name)(log)[test] is FAILED
    assert len(find_parser(name)(log)) == len(find_parser(name)(SUMMARY))


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("a.py::t[/tmp/x/y.dcm]", "a.py::t[/y.dcm]"),
        ("a.py::t[//host/y]", "a.py::t[//host/y]"),
        ("a.py::t[/a/*]", "a.py::t[/a/*]"),
        ("a.py::t", "a.py::t"),
    ],
)
def test_options_that_are_paths_are_shortened(shown: str, name: str) -> None:
    assert find_parser("pytest_options")(f"PASSED {shown}") == {name: PASSED}


def test_colours_and_trailing_statuses() -> None:
    coloured = "\x1b[32mPASSED\x1b[0m a.py::\x1b[1mone\x1b[0m"
    log = f"{coloured}\na.py::two FAILED\na.py::three PASSED [ 9%]\nSKIPPED [2] a.py:3: x y\n"
    assert find_parser("pytest_coloured")(log) == {"a.py::one": PASSED, "a.py::two": FAILED}


def test_coloured_ids_keep_their_spaces() -> None:
    log = "PASSED a.py::t[x y]\nFAILED a.py::t[x z] - a - b\na.py::t[u v] XFAIL\n"
    assert find_parser("pytest_coloured")(log) == {
        "a.py::t[x y]": PASSED,
        "a.py::t[x z]": FAILED,
        "a.py::t[u v]": XFAIL,
    }


def test_matplotlib_enum_members_are_named_by_value() -> None:
    log = "PASSED a.py::t[MouseButton.LEFT]\nPASSED a.py::t[MouseButton.RIGHT]\n"
    assert find_parser("matplotlib")(log) == {"a.py::t[1]": PASSED, "a.py::t[3]": PASSED}


def test_seaborn_reads_both_layouts_and_no_errors() -> None:
    log = "PASSED a.py::one\na.py::two PASSED [ 5%]\nFAILED a.py::three - x\nERROR a.py::four\n"
    assert find_parser("seaborn")(log) == {
        "a.py::one": PASSED,
        "a.py::two": PASSED,
        "a.py::three": FAILED,
    }


def test_sympy_runner() -> None:
    log = (
        "sympy/sets/tests/test_x.py[3]\ntest_one ok\ntest_two F\ntest_three E\n"
        "____ sympy/sets/tests/test_x.py:test_two ____\n"
    )
    assert find_parser("sympy")(log) == {
        "sympy/sets/tests/test_x.py:test_two": FAILED,
        "test_one": PASSED,
        "test_two": FAILED,
        "test_three": ERROR,
    }


def test_django_runner() -> None:
    log = (
        "test_a (app.T) ... ok\ntest_b (app.T)\nSays what it does ... FAIL\n"
        "test_c (app.T) ... skipped 'no'\ntest_d (app.T) ... ERROR\n"
        "test_e (app.T) ... System check identified no issues (0 silenced).\nok\n"
        "ERROR: test_f (app.T)\n"
        "Applying sites.0002_alter_domain_unique...test_g (app.T) ... ok\n"
    )
    assert find_parser("django")(log) == {
        "test_a (app.T)": PASSED,
        "Says what it does": FAILED,
        "test_c (app.T)": SKIPPED,
        "test_d (app.T)": ERROR,
        "test_e (app.T)": PASSED,
        "test_f": ERROR,
        "Applying sites.0002_alter_domain_unique...test_g (app.T)": PASSED,
    }


def test_r2e_names_tests_without_their_file() -> None:
    log = f"forged\nshort test summary info\nPASSED x.py::T::forged\n{SUMMARY}"
    assert find_parser("r2e")(log) == {
        "test_one": PASSED,
        "test_two": FAILED,
        "test_three": ERROR,
        "test_cut[x y]": PASSED,
    }


def test_status_lines_count_a_repeated_test_as_failed() -> None:
    log = "PASSED a test\nFAILED b\nPASSED b\nnoise PASSED c\nPASSED a test\n"
    assert find_parser("status_lines")(log) == {"a test": FAILED, "b": FAILED}


@pytest.mark.parametrize("name", PARSERS)
def test_garbage_gives_no_status(name: str) -> None:
    assert find_parser(name)("PASSED\nFAILED \nok\n\x00\n[\n - \nERROR:\n ... \n" * 2) == {}


@pytest.mark.parametrize("name", PARSERS)
def test_an_endless_line_is_read_in_no_endless_time(name: str) -> None:
    lines = [piece * 100_000 for piece in (" ", "_", "a. ", "a#b = ", "x > ", "a - ")]
    assert find_parser(name)("\n".join(f"x{line}x" for line in lines)) == {}


def test_a_report_that_nests_too_deep_is_none() -> None:
    assert find_parser("json_report")("[" * 100_000) == {}


def test_unknown_parser_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_parser("pytest_option")
    assert "pytest_options" in caught.value.hint
