"""Test logs to statuses per test id: one parser per test runner.

The rules are those by which SWE-bench judges, so that verdicts agree. Where lines about a test
disagree the worst one counts: test runners list failures last, so that honest logs read the same,
and code under test cannot talk over a failure by printing a line of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from swerl.core.errors import unknown
from swerl.core.grade import TestStatus
from swerl.grading import javascript_logs as javascript
from swerl.grading import jvm_logs as jvm
from swerl.grading import other_logs as other
from swerl.grading import python_logs as python
from swerl.grading import rebench_logs as rebench
from swerl.grading.statuses import Parser, Statuses, worst

_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL) +(\S.*?) *$", re.MULTILINE)


def find_parser(name: str) -> Parser:
    """Return the parser of this name. Raises UnknownNameError with the nearest names."""
    if name not in PARSERS:
        raise unknown("log parser", name, PARSERS)
    return PARSERS[name]


def status_lines(log: str) -> Statuses:
    """Read lines `PASSED id`, `FAILED id`, … of a runner that reports each test once.

    A second line about a test makes it fail: an honest runner writes none.
    """
    found: Statuses = {}
    for word, name in _LINE.findall(log):
        found[name] = TestStatus.FAILED if name in found else python.WORDS[word]
    return found


def json_report(report: str) -> Statuses:
    """Read `{"tests": [{"name": …, "status": "PASSED"}, …]}`; empty where it is something else."""
    try:
        tests = [(str(test["name"]), str(test["status"])) for test in json.loads(report)["tests"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return worst((name, python.WORDS.get(word.upper(), TestStatus.ERROR)) for name, word in tests)


PARSERS: Mapping[str, Parser] = {
    "status_lines": status_lines,
    "json_report": json_report,
    "pytest": python.pytest,
    "pytest_options": python.pytest_options,
    "pytest_coloured": python.pytest_coloured,
    "matplotlib": python.matplotlib,
    "seaborn": python.seaborn,
    "sympy": python.sympy,
    "django": python.django,
    "r2e": python.r2e,
    "jest": javascript.jest,
    "jest_json": javascript.jest_json,
    "vitest": javascript.vitest,
    "karma": javascript.karma,
    "tap": javascript.tap,
    "maven": jvm.maven,
    "gradle": jvm.gradle,
    "ant": jvm.ant,
    "redis": other.redis,
    "jq": other.jq,
    "doctest": other.doctest,
    "micropython": other.micropython,
    "googletest": other.googletest,
    "go_test": other.go_test,
    "cargo": other.cargo,
    "phpunit": other.phpunit,
    "minitest": other.minitest,
    "cucumber": other.cucumber,
    "ruby_unit": other.ruby_unit,
    "rspec": other.rspec,
    "phpunit_timed": rebench.phpunit_timed,
    "gradle_timed": rebench.gradle_timed,
    "junit": rebench.junit,
    "ctest": rebench.ctest,
    "test_lines": rebench.test_lines,
    "minitest_methods": rebench.minitest_methods,
    "swift": rebench.swift,
    "elixir": rebench.elixir,
    "xunit": rebench.xunit,
    "plenary": rebench.plenary,
    "mocha": rebench.mocha,
    "mocha_headings": rebench.mocha_headings,
}
"""Parsers by the name that a Task's `log_parser` gives."""
