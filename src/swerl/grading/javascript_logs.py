"""Logs of JavaScript's test runners, read by SWE-bench's rules."""

from __future__ import annotations

import re

from swerl.core.grade import TestStatus
from swerl.grading.statuses import Line, Statuses, by_line, worst

_KARMA_LINE = re.compile(r"(?P<indent>\s*)(?P<mark>[✔✖])?\s(?P<name>.*)")

_CROSS = "\N{MULTIPLICATION SIGN}"

_jest_lines = by_line(
    r"(?P<status>[✓✕○])\s(?P<name>.+?)(?:\s\(\d+\s*m?s\))?$",
    {"✓": TestStatus.PASSED, "✕": TestStatus.FAILED, "○": TestStatus.SKIPPED},
)

jest_json = by_line(
    r"\[(?P<status>PASSED|FAILED)\]\s(?P<name>.+)",
    {"PASSED": TestStatus.PASSED, "FAILED": TestStatus.FAILED},
)
"""Read `[PASSED] name` lines, which SWE-bench's commands make of `jest --json`."""

vitest = by_line(
    rf"(?P<status>[✓{_CROSS}↓])\s(?P<name>.+?)(?:\s(?:\d+\s*m?s?|\[skipped\]))?$",
    {"✓": TestStatus.PASSED, _CROSS: TestStatus.FAILED, "↓": TestStatus.SKIPPED},
)
"""Read `vitest --reporter=verbose`."""

tap = by_line(
    r"(?P<status>ok|not ok) \d+ (?P<name>.+)",
    {"ok": TestStatus.PASSED, "not ok": TestStatus.FAILED},
)
"""Read the Test Anything Protocol; what follows the number is the name, directives included."""


def jest(log: str) -> Statuses:
    """Read `jest --verbose`; suites are no part of the names."""
    return worst((name.strip(), status) for name, status in _jest_lines(log).items())


def karma(log: str) -> Statuses:
    """Read karma's mocha reporter: `suite > … > test`, until its summary."""
    found: list[Line] = []
    suites: list[str] = []
    depth = -1
    started = False
    for line in log.split("\n"):
        if line.startswith("SUMMARY:"):
            break
        if "Starting browser" in line:
            started = True
            continue
        match = _KARMA_LINE.match(line)
        if not match or not started:
            continue
        indent, mark, name = match["indent"], match["mark"], match["name"]
        if mark:
            status = TestStatus.PASSED if mark == "✔" else TestStatus.FAILED
            found.append((" > ".join([*suites, name]), status))
        elif indent and len(indent) > depth:
            suites.append(name)
            depth = len(indent)
        elif indent and len(indent) < depth:
            # A line further left closes one suite and opens none: so SWE-bench names tests.
            suites[-1:] = []
            depth = len(indent)
    return worst(found)
