"""No log that code under test can print takes a parser more than linear time."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable, Iterator

import pytest

from swerl.grading.log_parsers import PARSERS, LogError, find_parser, parse_log
from swerl.grading.statuses import MAX_TESTS

from .agreement import foreign
from .test_log_parsers import CASES

SIZES = (3_000, 12_000, 48_000)
FAST_S = 0.1
"""CPU seconds below which a log is read fast enough, whatever a shorter one takes."""
MAX_RATIO = 9.0
"""Largest ratio of times for four times the text: 4 if linear, 16 if quadratic."""
NUM_DRAWN = 30
PYTEST = "PASSED a.py::t[x y]\nFAILED a.py::t[/a] - b\n0.01s call     a.py::t[x]\na.py::t PASSED\n"
SAMPLES = {
    **{name: log for name, (log, _) in CASES.items()},
    "django": "test_a (b.C) ... ok\nt ... Testing against Django installed in '/x' silenced).\nok\n"
    "t ... Internal Server Error: /x/\nok\nERROR: t\nt ... skipped 'x'\n",
    "sympy": "________ a.py:test_b ________\ntest_a ok\ntest_b F\n",
    "r2e": "short test summary info\nPASSED a.py::T::t\n",
    "json_report": '{"tests": [{"name": "a", "status": "PASSED"}]}',
    "jest": foreign.JEST,
    "jest_json": foreign.JEST_JSON,
    "vitest": foreign.VITEST,
    "karma": foreign.KARMA,
    "tap": foreign.TAP,
    "maven": foreign.MAVEN,
    "gradle": foreign.GRADLE,
    "ant": foreign.ANT,
    "redis": foreign.REDIS,
    "jq": foreign.AUTOMAKE,
    "doctest": foreign.DOCTEST,
    "micropython": foreign.MICROPYTHON,
    "googletest": foreign.GOOGLETEST,
    "go_test": foreign.GO,
    **dict.fromkeys(("cargo", "cargo_modes"), foreign.CARGO),
    "phpunit": foreign.PHPUNIT,
    "minitest": foreign.MINITEST,
    "cucumber": foreign.CUCUMBER,
    "ruby_unit": foreign.RUBY_UNIT,
    "rspec": foreign.RSPEC,
}
"""An honest log by parser; those without one read pytest."""
BLANKS = (
    *("\n", " ", "\t", "\r\n", "[", "(", "<", "{", '"', "1", "-", ":", ".", "x", "_"),
    *("a. ", "a#b = ", "x > ", "a - "),
)
"""Pieces that are repeated for every parser."""


def hostile(sample: str, rng: random.Random, num_drawn: int) -> Iterator[Callable[[int], str]]:
    """Yield makers of logs of a size: one piece, or two of the sample's own, again and again."""
    for piece in BLANKS:
        yield lambda size, piece=piece: repeated("", piece, "", size)
    lines = [re.findall(r"\s+|\w+|[^\w\s]", line) for line in sample.split("\n")]
    tokens = sorted({token for line in lines for token in line} | {"\n", " ", "  "})
    pairs = [a + b for a, b in itertools.product(tokens, tokens)] + tokens
    whole = ["".join(line) + "\n" for line in lines]
    for _ in range(num_drawn):
        line = rng.choice(lines)
        cut = rng.randrange(len(line) + 1)
        before, after = "".join(line[:cut]), rng.choice(["", "!", "".join(line[cut:])])
        piece = rng.choice([*pairs, *whole])
        if rng.random() < 0.3:
            before, piece, after = "", before + piece + after, rng.choice(["", "\n"])
        yield lambda size, b=before, p=piece, a=after: repeated(b, p, a, size)


def repeated(before: str, piece: str, after: str, size: int) -> str:
    return before + piece * (size // max(len(piece), 1)) + after


def cpu_s(read: Callable[[str], object], log: str) -> float:
    started = time.process_time()
    read(log)
    return time.process_time() - started


def assert_linear(read: Callable[[str], object], make: Callable[[int], str]) -> None:
    """Fail if four times the text takes much more than four times the work."""
    before = 0.0
    for size in SIZES:
        log = make(size)
        taken = cpu_s(read, log)
        if taken > max(FAST_S, MAX_RATIO * before) and before:
            # Other work on this machine may have slowed one reading down.
            taken = min(cpu_s(read, log) for _ in range(2))
            assert taken <= max(FAST_S, MAX_RATIO * before), (size, taken, before, log[:200])
        before = taken


@pytest.mark.parametrize("name", PARSERS)
def test_a_hostile_log_takes_linear_time(name: str) -> None:
    read = find_parser(name)
    for make in hostile(SAMPLES.get(name, PYTEST), random.Random(name), NUM_DRAWN):
        assert_linear(read, make)


@pytest.mark.integration
@pytest.mark.parametrize("line", ["✔ {}", "- {}"])
def test_a_log_of_too_many_tests_is_not_read(line: str) -> None:
    log = "\n".join(line.format(number) for number in range(MAX_TESTS + 1))
    with pytest.raises(LogError, match="it names more than 500,000 tests"):
        parse_log(find_parser("mocha"), log)


@pytest.mark.parametrize(
    ("name", "start", "test"),
    [
        ("phpunit", "A{0} (B)\n", "✔ t\n"),
        ("phpunit_timed", "A{0} (B)\n", "✔ t [1 ms]\n"),
        ("karma", "Starting browser\n  A{0}\n", "    ✔ t\n"),
        ("doctest", '<doctest><TestCase name="{0}">', '<SubCase name="t"/>'),
    ],
)
def test_a_long_suite_with_many_tests_is_not_read(name: str, start: str, test: str) -> None:
    end = "</TestCase></doctest>" if name == "doctest" else ""
    log = start.format("x" * 100_000) + test * 1_000 + end
    with pytest.raises(LogError, match="the names of its tests exceed 67,108,864 characters"):
        parse_log(find_parser(name), log)
