"""Logs of the runners that SWE-rebench V2 adds give the names that its rows declare."""

from __future__ import annotations

import pytest

from swerl.core.grade import TestStatus
from swerl.grading.log_parsers import find_parser

PASSED, FAILED, ERROR = TestStatus.PASSED, TestStatus.FAILED, TestStatus.ERROR
SKIPPED = TestStatus.SKIPPED

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
        "2/3 Test #20: a b ....   Timeout 1 sec\n3/3 Test #3: c ...***Failed 1 sec\n",
        {"adds": PASSED, "a b": FAILED},
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


@pytest.mark.parametrize("name", CASES)
def test_names_and_statuses(name: str) -> None:
    log, statuses = CASES[name]
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
    ],
)
def test_mocha_names_have_no_duration_at_their_end(line: str, name: str | None) -> None:
    assert find_parser("mocha")(line) == ({name: PASSED} if name else {})


def test_minitest_reads_a_test_that_prints() -> None:
    log = (
        "TillTest#test_a = debug: 3\nTillTest#b: 1\n0.01 s = .\n"
        "TillTest#test_b = no newline0.02 s = F\nTillTest#test_c = 0.00 s = S\n0.01 s = .\n"
    )
    assert find_parser("minitest_methods")(log) == {
        "TillTest#test_a": TestStatus.PASSED,
        "TillTest#test_b": TestStatus.FAILED,
        "TillTest#test_c": TestStatus.SKIPPED,
    }
