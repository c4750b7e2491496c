"""Logs of test runners that SWE-rebench V2 reads and SWE-bench does not, by its rules."""

from __future__ import annotations

import re

from swerl.core.grade import TestStatus
from swerl.grading.other_logs import phpunit
from swerl.grading.statuses import Line, Parser, Statuses, by_line, lines, worst

_PASSED, _FAILED, _SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED

_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_DURATION = re.compile(r"\s*(?:\(\s*)?\d+(?:\.\d+)?\s*(?:ms|s)\s*\)?\s*$", re.IGNORECASE)
_PHP_DURATION = re.compile(r"\s*\[\s*\d+(?:\.\d+)?\s*(?:ms|s)\s*\]\s*$", re.IGNORECASE)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_JUNIT_MARKS = {"<failure": _FAILED, "<error": TestStatus.ERROR, "<skipped": _SKIPPED}

gradle_timed = by_line(
    r"(?P<name>[^>].+?)\s+(?P<status>PASSED|FAILED)(?:\s+\(\d+(?:\.\d+)?s\))?$",
    {"PASSED": _PASSED, "FAILED": _FAILED},
)
"""Read lines `class > test PASSED (0.1s)` of gradle."""

ctest = by_line(
    r"\d+/\d+\s+Test\s+#\d+:\s+(?P<name>.+?)\s+\.+\s+(?P<status>Passed|Failed|Skipped|Timeout)\b",
    {"Passed": _PASSED, "Failed": _FAILED, "Skipped": _SKIPPED, "Timeout": _FAILED},
)
"""Read `1/2 Test #1: name .... Passed` of CMake's ctest."""

test_lines = by_line(
    r"Test\s+(?P<name>.*?)\s+(?P<status>passed|failed|skipped)$",
    {"passed": _PASSED, "failed": _FAILED, "skipped": _SKIPPED},
)
"""Read lines `Test name passed`."""

minitest_methods = by_line(
    r"(?P<name>.+?#.+?)\s+=\s+[\d.]+\s+s\s+=\s+(?P<status>[.FES])$",
    {".": _PASSED, "F": _FAILED, "E": _FAILED, "S": _SKIPPED},
)
"""Read minitest's `Class#method = 0.01 s = .`."""

swift = by_line(
    r"Test Case '(?P<name>[^']+)'\s+(?P<status>passed|failed)\s+\([0-9.]+\s+seconds\)$",
    {"passed": _PASSED, "failed": _FAILED},
)
"""Read XCTest of Swift."""


def _by_rules(*rules: tuple[str, TestStatus], is_timed: bool = False) -> Parser:
    """Return a parser that takes each line's name and status from the first rule that matches.

    `is_timed` takes durations off the names.
    """
    compiled = [(re.compile(pattern), status) for pattern, status in rules]

    def parse(log: str) -> Statuses:
        found: list[Line] = []
        for line in lines(_COLOUR_CODE.sub("", log)):
            matches = ((pattern.match(line), status) for pattern, status in compiled)
            first = next(((match, status) for match, status in matches if match), None)
            if not first:
                continue
            name = _DURATION.sub("", first[0][1]) if is_timed else first[0][1]
            if name.strip():
                found.append((name.strip(), first[1]))
        return worst(found)

    return parse


elixir = _by_rules(
    (r"\*\s+test\s+(.*?)\s+\(skipped\)\s+\[L#\d+\]$", _SKIPPED),
    (r"\d+\)\s+test\s+(.*?)\s+\([^)]+\)$", _FAILED),
    (r"\*\s+test\s+(.*?)(?:\s+\([\d.]+ms\))?\s+\[L#\d+\]$", _PASSED),
)
"""Read `mix test --trace` of Elixir."""

xunit = _by_rules(
    (r"\[xUnit\.net\s+[\d:.]+\]\s+(.+?)\s+\[FAIL\]$", _FAILED),
    (r"Failed\s+(.+?)\s+\[.+?\]$", _FAILED),
    (r"Skipped\s+(.+?)(?:\s+\[.+?\])?$", _SKIPPED),
    (r"Passed\s+(.+?)\s+\[.+?\]$", _PASSED),
)
"""Read xUnit.net of C#."""

plenary = _by_rules(
    (r"Fail(?:ed)?\s*\|\|\s*(.+)", _FAILED),
    (r"(?i:skip(?:ped)?)\s*\|\|\s*(.+)", _SKIPPED),
    (r"Success\s*\|\|\s*(.+)", _PASSED),
)
"""Read Neovim's plenary: `Success || name`."""

mocha = _by_rules(
    (r"-\s+(.*)", _SKIPPED), (r"\d+\)\s+(.*)", _FAILED), (r"✔\s+(.*)", _PASSED), is_timed=True
)
"""Read mocha's `✔ name`, `1) name` and `- name`, without durations."""

mocha_headings = _by_rules(
    (r"-\s+(.*)", _SKIPPED),
    (r"\d+\)\s+(.*?):$", _FAILED),
    (r"\[W\]\s*\d+\)\s+(.*)", _FAILED),
    (r"✔\s+(.*)", _PASSED),
    is_timed=True,
)
"""Read mocha where a failure counts by the heading `1) name:` of its details."""


def phpunit_timed(log: str) -> Statuses:
    """Read `phpunit --testdox` and drop durations from names."""
    return worst((_PHP_DURATION.sub("", name).strip(), s) for name, s in phpunit(log).items())


def junit(log: str) -> Statuses:
    """Read every `<testcase>` of JUnit reports in the log: `class name`."""
    found: list[Line] = []
    for case in log.split("<testcase")[1:]:
        tag, _, rest = case.partition(">")
        body = "" if tag.endswith("/") else rest.partition("</testcase>")[0]
        attributes = dict(_ATTRIBUTE.findall(tag))
        if name := attributes.get("name"):
            marks = (status for mark, status in _JUNIT_MARKS.items() if mark in body)
            full_name = f"{attributes.get('classname', '')} {name}".strip()
            found.append((full_name, next(marks, _PASSED)))
    return worst(found)
