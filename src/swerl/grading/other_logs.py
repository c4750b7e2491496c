"""Logs of the test runners of C, C++, Go, PHP, Ruby and Rust, read by SWE-bench's rules."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from swerl.core.grade import TestStatus
from swerl.grading.statuses import Line, Statuses, by_line, worst

_PASSED, _FAILED, _SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED

_DOCTEST = re.compile(r"<doctest.*?</doctest>", re.DOTALL)
_PHP_SUITE = re.compile(r"(\w.+) \(.+\)")
_PHP_TEST = re.compile(r"\s*([✔✘↩])\s*(.*)")
_PHP_MARKS = {"✔": _PASSED, "✘": _FAILED, "↩": _SKIPPED}
_REDIS_FILE = re.compile(r"\s+in\s+\S+$")

_redis_lines = by_line(
    r"\[(?P<status>ok|err|skip|ignore)\]:\s(?P<name>.+?)(?:\s\(\d+\s*m?s\))?$",
    {"ok": _PASSED, "err": _FAILED, "skip": _SKIPPED, "ignore": _SKIPPED},
)

jq = by_line(r"(?P<status>PASS|FAIL):\s(?P<name>.+)", {"PASS": _PASSED, "FAIL": _FAILED})
"""Read automake's lines `PASS: test`."""

micropython = by_line(
    r"(?P<status>pass|FAIL|skip)\s+(?P<name>.+)",
    {"pass": _PASSED, "FAIL": _FAILED, "skip": _SKIPPED},
)
"""Read MicroPython's own runner."""

googletest = by_line(
    r".*\[\s*(?P<status>OK|FAILED)\s*\]\s(?P<name>.*)\s\(.*\)$",
    {"OK": _PASSED, "FAILED": _FAILED},
)
"""Read googletest's lines `[ OK ] suite.test (0 ms)`; the summary's have no time."""

go_test = by_line(
    r"--- (?P<status>PASS|FAIL|SKIP): (?P<name>.+) \(.+\)$",
    {"PASS": _PASSED, "FAIL": _FAILED, "SKIP": _SKIPPED},
)
"""Read `go test -v`, subtests included."""

cargo = by_line(
    r"test\s+(?P<name>\S+)\s+\.\.\.\s+(?P<status>ok|FAILED)$", {"ok": _PASSED, "FAILED": _FAILED}
)
"""Read `cargo test`; ignored tests are no tests."""

minitest = by_line(
    r"(?P<name>.+)\. .*=.*(?P<status>[.FE])", {".": _PASSED, "F": _FAILED, "E": _FAILED}
)
"""Read `name. = 0.01 s = .`: the last dot, F or E of a line counts."""

cucumber = by_line(r"(?P<name>.*) \.+(?P<status>[.F])", {".": _PASSED, "F": _FAILED})
"""Read Cucumber's progress, one scenario a line."""

ruby_unit = by_line(
    r"(?:test: )?(?P<name>.+):\s+(?P<status>\.|[EFO]\b)",
    {".": _PASSED, "E": _FAILED, "F": _FAILED, "O": _SKIPPED},
)
"""Read `test-unit -v`."""

rspec = by_line(r"(?P<name>.+) - (?P<status>passed|failed)", {"passed": _PASSED, "failed": _FAILED})
"""Read `name - status` lines, which SWE-bench's commands make of RSpec's JSON."""


def redis(log: str) -> Statuses:
    """Read `[ok]: test` lines; a failure's line also names the file, which is no part of the id."""
    return worst(
        (_REDIS_FILE.sub("", name) if status is _FAILED else name, status)
        for name, status in _redis_lines(log).items()
    )


def doctest(log: str) -> Statuses:
    """Read the XML reports of C++'s doctest: a subcase passes where all its expressions do."""
    found: list[Line] = []
    for report in _DOCTEST.findall(log):
        try:
            root = ElementTree.fromstring(report)
        except ElementTree.ParseError:
            continue
        for case in root.iterfind(".//TestCase"):
            for part in case.iterfind(".//SubCase"):
                good = all(each.get("success") == "true" for each in part.iter("Expression"))
                name = f"{case.get('name')} > {part.get('name')}"
                found.append((name, _PASSED if good else _FAILED))
    return worst(found)


def phpunit(log: str) -> Statuses:
    """Read `phpunit --testdox`: `suite > test`."""
    found: list[Line] = []
    suite: str | None = None
    for line in log.split("\n"):
        if match := _PHP_SUITE.fullmatch(line):
            suite = match[1]
        elif match := _PHP_TEST.fullmatch(line):
            found.append((f"{suite} > {match[2]}", _PHP_MARKS[match[1]]))
    return worst(found)
