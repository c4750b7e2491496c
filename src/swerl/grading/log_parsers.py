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
from swerl.grading import python_logs, runner_logs
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
        found[name] = TestStatus.FAILED if name in found else python_logs.WORDS[word]
    return found


def json_report(report: str) -> Statuses:
    """Read `{"tests": [{"name": …, "status": "PASSED"}, …]}`; empty for other text."""
    try:
        tests = [(str(test["name"]), str(test["status"])) for test in json.loads(report)["tests"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return worst(
        (name, python_logs.WORDS.get(word.upper(), TestStatus.ERROR)) for name, word in tests
    )


# fmt: off
_PYTHON = (
    "pytest", "pytest_options", "pytest_coloured", "matplotlib", "seaborn", "sympy", "django",
    "r2e",
)
_OTHERS = (
    "jest", "jest_json", "vitest", "karma", "tap", "maven", "gradle", "ant", "redis", "jq",
    "doctest", "micropython", "googletest", "go_test", "cargo", "phpunit", "minitest", "cucumber",
    "ruby_unit", "rspec", "phpunit_timed", "gradle_timed", "junit", "ctest", "test_lines",
    "minitest_methods", "swift", "elixir", "xunit", "plenary", "mocha", "mocha_headings",
)
# fmt: on
PARSERS: Mapping[str, Parser] = {
    "status_lines": status_lines,
    "json_report": json_report,
    **{name: getattr(python_logs, name) for name in _PYTHON},
    **{name: getattr(runner_logs, name) for name in _OTHERS},
}
"""Parsers by the name that a Task's `log_parser` gives; it is also the function's name."""
