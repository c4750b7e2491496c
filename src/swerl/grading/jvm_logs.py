"""Logs of Java's build tools, read by SWE-bench's rules."""

from __future__ import annotations

import re

from swerl.core.grade import TestStatus
from swerl.grading.statuses import Line, Statuses, by_line, lines, worst

_MAVEN_TEST = re.compile(r".*-Dtest=(\S+)")
_MAVEN_RESULT = re.compile(r".*BUILD (SUCCESS|FAILURE)$")
_GRADLE_LINE = re.compile(r"([^>].+)\s+(PASSED|FAILED)$")
_GRADLE_NAME = re.compile(r"([^>]\S*\s+>\s+\S+)$")
_WORDS = {
    "PASS": TestStatus.PASSED,
    "FAIL": TestStatus.FAILED,
    "ERR": TestStatus.FAILED,
    "PASSED": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "SUCCESS": TestStatus.PASSED,
    "FAILURE": TestStatus.FAILED,
}

ant = by_line(r"\[junit\]\s+\[(?P<status>PASS|FAIL|ERR)\]\s+(?P<name>.*)", _WORDS)
"""Read the lines `[junit] [PASS] test` of ant."""


def maven(log: str) -> Statuses:
    """Read `mvn -Dtest=NAME` commands, as the shell's trace shows them, and each one's result.

    Maven names no passing test, so that every test has a command of its own; the n-th result is
    the n-th command's. Results before the first command are those of a build, and more results
    than commands are none that Maven alone wrote.
    """
    tests, results = list[str](), list[str]()
    for line in map(str.strip, log.split("\n")):
        if match := _MAVEN_TEST.match(line):
            tests.append(match[1])
        match = _MAVEN_RESULT.match(line)
        if match and tests:
            results.append(match[1])
    if len(results) > len(tests):
        return dict.fromkeys(tests, TestStatus.FAILED)
    return worst((test, _WORDS[word]) for test, word in zip(tests, results, strict=False))


def gradle(log: str) -> Statuses:
    """Read lines `class > test PASSED`, also where the status comes on a later line."""
    found: list[Line] = []
    open_test = ""
    for line in lines(log):
        if match := _GRADLE_LINE.match(line):
            found.append((match[1], _WORDS[match[2]]))
            open_test = ""
        elif match := _GRADLE_NAME.match(line):
            open_test = match[1]
        elif open_test and line in {"PASSED", "FAILED"}:
            found.append((open_test, _WORDS[line]))
            open_test = ""
    return worst(found)
