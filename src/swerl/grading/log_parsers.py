"""Test logs to statuses per test id: one parser per test runner.

The rules are those of SWE-bench, so that verdicts agree, with one difference: if lines about a test
disagree, the worst one counts. Runners list failures last, so an honest log reads the same. Code
under test cannot hide a failure by a line of its own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping

from swerl.core import plugins
from swerl.core.errors import unknown
from swerl.core.grade import TestStatus
from swerl.grading import python_logs as python
from swerl.grading import runner_logs as runners
from swerl.grading.statuses import Parser, Statuses, worst

_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL) +(\S.*?) *$", re.MULTILINE)


def find_parser(name: str) -> Parser:
    """Return the parser of this name. Raises UnknownNameError with the nearest names."""
    if name not in PARSERS:
        raise unknown("log parser", name, PARSERS)
    return PARSERS[name]


def unsupported(kinds: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return how many Tasks need a grader or log parser that is not installed, by reason.

    `kinds` maps (grader, log parser) to a number of Tasks. The most frequent reason comes first.
    """
    graders = {name.replace("-", "_") for name in plugins.names("graders")}
    found: Counter[str] = Counter()
    for (grader, parser), count in kinds.items():
        if grader not in graders:
            found[f"no grader {grader} is installed"] += count
        elif parser and parser not in PARSERS:
            found[f"no log parser {parser} is installed"] += count
    return dict(found.most_common())


def status_lines(log: str) -> Statuses:
    """Read lines `PASSED id`, `FAILED id`, … of a runner that reports each test once.

    A test with a second line fails: an honest runner writes only one.
    """
    found: Statuses = {}
    for word, name in _LINE.findall(log):
        found[name] = TestStatus.FAILED if name in found else python.WORDS[word]
    return found


def json_report(report: str) -> Statuses:
    """Read `{"tests": [{"name": …, "status": "PASSED"}, …]}`; empty for other text."""
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
    "jest": runners.jest,
    "jest_json": runners.jest_json,
    "vitest": runners.vitest,
    "karma": runners.karma,
    "tap": runners.tap,
    "maven": runners.maven,
    "gradle": runners.gradle,
    "ant": runners.ant,
    "redis": runners.redis,
    "jq": runners.jq,
    "doctest": runners.doctest,
    "micropython": runners.micropython,
    "googletest": runners.googletest,
    "go_test": runners.go_test,
    "cargo": runners.cargo,
    "phpunit": runners.phpunit,
    "minitest": runners.minitest,
    "cucumber": runners.cucumber,
    "ruby_unit": runners.ruby_unit,
    "rspec": runners.rspec,
    "phpunit_timed": runners.phpunit_timed,
    "gradle_timed": runners.gradle_timed,
    "junit": runners.junit,
    "ctest": runners.ctest,
    "test_lines": runners.test_lines,
    "minitest_methods": runners.minitest_methods,
    "swift": runners.swift,
    "elixir": runners.elixir,
    "xunit": runners.xunit,
    "plenary": runners.plenary,
    "mocha": runners.mocha,
    "mocha_headings": runners.mocha_headings,
}
"""Parsers by the name that a Task's `log_parser` gives."""
