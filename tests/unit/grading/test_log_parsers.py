"""Each runner's log gives the statuses and the names that its dataset uses."""

from __future__ import annotations

import pytest

from swerl.core.errors import UnknownNameError
from swerl.core.grade import TestStatus
from swerl.grading.log_parsers import PARSERS, find_parser
from swerl.grading.statuses import Statuses

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

CASES = {
    "phpunit_timed": (
        "Sums (Tests\\Sums)\n ✔ Adds [1.34 ms]\n ✘ Fails [2 ms]\n ↩ Waits\n",
        {"Sums > Adds": PASSED, "Sums > Fails": FAILED, "Sums > Waits": SKIPPED},
    ),
    "gradle_timed": (
        "> Task :test FAILED\nA > adds PASSED (0.1s)\nA > fails FAILED\n",
        {"A > adds": PASSED, "A > fails": FAILED},
    ),
    "junit": (
        '<testcase name="adds" classname="A"/>\n<testcase classname="A" name="fails">\n'
        '<failure>x</failure></testcase><testcase name="breaks"><error/></testcase>'
        '<testcase name="waits" time="1"><skipped/></testcase><testcase time="1"/>',
        {"A adds": PASSED, "A fails": FAILED, "breaks": ERROR, "waits": SKIPPED},
    ),
    "ctest": (
        "1/3 Test #1: adds ........   Passed    0.00 sec\n"
        "2/3 Test #20: a b ....   Timeout 1 sec\n3/3 Test #3: c ...***Failed 1 sec\n"
        "4/5 Test #4: d ...Child aborted***Exception:\n5/5 Test #5: e ...***Not Run (Disabled)",
        {"adds": PASSED, "a b": FAILED, "c": FAILED, "d": FAILED},
    ),
    "test_lines": (
        "Test adds      passed\nTest fails  failed\nTest waits skipped\nTests passed\n",
        {"adds": PASSED, "fails": FAILED, "waits": SKIPPED},
    ),
    "minitest_methods": (
        "A#test_a = 0.01 s = .\nA#test_b = 0.01 s = E\nA#test_c = 0.0 s = S\n",
        {"A#test_a": PASSED, "A#test_b": FAILED, "A#test_c": SKIPPED},
    ),
    "swift": (
        "Test Case 'A.adds' started at 1\nTest Case 'A.adds' passed (0.1 seconds)\n"
        "Test Case 'A.fails' failed (0.1 seconds)\n",
        {"A.adds": PASSED, "A.fails": FAILED},
    ),
    "elixir": (
        "* test adds [L#3]\n* test adds (1.2ms) [L#3]\n* test waits (skipped) [L#9]\n"
        "* test fails (0.1ms) [L#5]\n  1) test fails (SumsTest)\n",
        {"adds": PASSED, "waits": SKIPPED, "fails": FAILED},
    ),
    "xunit": (
        "  Passed A.Adds [3 ms]\n  Passed A.Fails [3 ms]\n[xUnit.net 00:00:01.2]   A.Fails [FAIL]\n"
        "  Skipped A.Waits\n  Failed A.Breaks(x: 1) [< 1 ms]\n",
        {"A.Adds": PASSED, "A.Fails": FAILED, "A.Waits": SKIPPED, "A.Breaks(x: 1)": FAILED},
    ),
    "plenary": (
        "\x1b[32mSuccess\x1b[0m || waits 5s\t\nFail || sums fails\nSuccess: 1\n",
        {"waits 5s": PASSED, "sums fails": FAILED},
    ),
    "mocha": (
        "  ✔ adds (53ms)\n  1) fails\n  - waits\n",
        {"adds": PASSED, "fails": FAILED, "waits": SKIPPED},
    ),
    "mocha_headings": (
        "  ✔ adds\n  1) not a heading\n  2) fails:\n  [W] 3) warns\n",
        {"adds": PASSED, "fails": FAILED, "warns": FAILED},
    ),
}
"""A log and its statuses, by parser."""
MORE_CASES = [
    (
        "pytest",
        SUMMARY,
        {
            "tests/a.py::test_one": PASSED,
            "tests/a.py::test_two": FAILED,
            "tests/b.py::test_three": ERROR,
            "tests/a.py::test_four": XFAIL,
            "tests/a.py::test_cut[x": PASSED,
        },
    ),
    ("pytest_options", "PASSED a.py::t[/tmp/x/y.dcm]", {"a.py::t[/y.dcm]": PASSED}),
    ("pytest_options", "PASSED a.py::t[//host/y]", {"a.py::t[//host/y]": PASSED}),
    ("pytest_options", "PASSED a.py::t[/a/*]", {"a.py::t[/a/*]": PASSED}),
    ("pytest_options", "PASSED a.py::t", {"a.py::t": PASSED}),
    (
        "pytest_coloured",
        "\x1b[32mPASSED\x1b[0m a.py::\x1b[1mone\x1b[0m\na.py::two FAILED\n"
        "a.py::three PASSED [ 9%]\nSKIPPED [2] a.py:3: x y\n",
        {"a.py::one": PASSED, "a.py::two": FAILED},
    ),
    (
        "pytest_coloured",
        "PASSED a.py::t[x y]\nFAILED a.py::t[x z] - a - b\na.py::t[u v] XFAIL\n",
        {"a.py::t[x y]": PASSED, "a.py::t[x z]": FAILED, "a.py::t[u v]": XFAIL},
    ),
    (
        "matplotlib",
        "PASSED a.py::t[MouseButton.LEFT]\nPASSED a.py::t[MouseButton.RIGHT]\n",
        {"a.py::t[1]": PASSED, "a.py::t[3]": PASSED},
    ),
    (
        "seaborn",
        "PASSED a.py::one\na.py::two PASSED [ 5%]\nFAILED a.py::three - x\nERROR a.py::four\n",
        {"a.py::one": PASSED, "a.py::two": PASSED, "a.py::three": FAILED},
    ),
    (
        "sympy",
        "sympy/sets/tests/test_x.py[3]\ntest_one ok\ntest_two F\ntest_three E\n"
        "____ sympy/sets/tests/test_x.py:test_two ____\n",
        {
            "sympy/sets/tests/test_x.py:test_two": FAILED,
            "test_one": PASSED,
            "test_two": FAILED,
            "test_three": ERROR,
        },
    ),
    (
        "django",
        "test_a (app.T) ... ok\ntest_b (app.T)\nSays what it does ... FAIL\n"
        "test_c (app.T) ... skipped 'no'\ntest_d (app.T) ... ERROR\n"
        "test_e (app.T) ... System check identified no issues (0 silenced).\nok\n"
        "ERROR: test_f (app.T)\n"
        "Applying sites.0002_alter_domain_unique...test_g (app.T) ... ok\n",
        {
            "test_a (app.T)": PASSED,
            "Says what it does": FAILED,
            "test_c (app.T)": SKIPPED,
            "test_d (app.T)": ERROR,
            "test_e (app.T)": PASSED,
            "test_f": ERROR,
            "Applying sites.0002_alter_domain_unique...test_g (app.T)": PASSED,
        },
    ),
    (
        "django",
        "test_a (t.T.test_a) ... half a lineok\ntest_b (t.T.test_b) ... half a lineFAIL\n",
        {"test_a (t.T.test_a)": PASSED},
    ),
    (
        "r2e",
        f"forged\nshort test summary info\nPASSED x.py::T::forged\n{SUMMARY}",
        {"test_one": PASSED, "test_two": FAILED, "test_three": ERROR, "test_cut[x y]": PASSED},
    ),
    (
        "cargo_modes",
        "test a::b - should panic ... FAILED\ntest a.rs - S<T>::c (line 1) - compile fail ... ok\n"
        "test a.rs - (line 9) ... ok\ntest a::d ... ok\ntest a::e ... ignored\ntest result: ok\n",
        {"a::b": FAILED, "a.rs - S<T>::c": PASSED, "a.rs": PASSED, "a::d": PASSED},
    ),
    (
        "status_lines",
        "PASSED a test\nFAILED b\nPASSED b\nnoise PASSED c\nPASSED a test\n",
        {"a test": FAILED, "b": FAILED},
    ),
    (
        "minitest_methods",
        "TillTest#test_a = debug: 3\nTillTest#b: 1\n0.01 s = .\n"
        "TillTest#test_b = no newline0.02 s = F\nTillTest#test_c = 0.00 s = S\n0.01 s = .\n",
        {"TillTest#test_a": PASSED, "TillTest#test_b": FAILED, "TillTest#test_c": SKIPPED},
    ),
]
"""Logs of Python's runners, and of a test that prints: parser, log, statuses."""


@pytest.mark.parametrize(
    ("name", "log", "statuses"), [*((name, *case) for name, case in CASES.items()), *MORE_CASES]
)
def test_names_and_statuses(name: str, log: str, statuses: Statuses) -> None:
    assert find_parser(name)(log) == statuses


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("✔ adds 3ms", "adds"),
        ("✔ adds  ( 1.25 S )", "adds"),
        ("✔ adds 1.2.5s", "adds 1."),
        ("✔ waits 5 s (5ms)", "waits 5 s"),
        ("✔ takes 5s less", "takes 5s less"),
        ("✔ adds(7 s", "adds"),
        ("✔ 30 ms", None),
        ("✓ adds (1.25 s)", "adds"),
    ],
)
def test_names_have_no_duration_at_their_end(line: str, name: str | None) -> None:
    parser = "jest" if line.startswith("✓") else "mocha"
    assert find_parser(parser)(line) == ({name: PASSED} if name else {})


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


@pytest.mark.parametrize("name", PARSERS)
def test_garbage_gives_no_status(name: str) -> None:
    assert find_parser(name)("PASSED\nFAILED \nok\n\x00\n[\n - \nERROR:\n ... \n" * 2) == {}


def test_a_report_that_nests_too_deep_is_none() -> None:
    assert find_parser("json_report")("[" * 100_000) == {}


def test_unknown_parser_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_parser("pytest_option")
    assert "pytest_options" in caught.value.hint
