"""Test logs to statuses per test id: one parser per test runner.

The rules are those by which SWE-bench judges, so that verdicts agree: the id is the word after
the status, and what is no status line is ignored. Where lines about a test disagree the worst one
counts: test runners list failures last, so that honest logs read the same, and code under test
cannot talk over a failure by printing a line of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from swerl.errors import unknown
from swerl.grade import TestStatus

Statuses: TypeAlias = dict[str, TestStatus]
Parser: TypeAlias = Callable[[str], Statuses]
_Line: TypeAlias = tuple[str, TestStatus]

_BAD = frozenset({TestStatus.FAILED, TestStatus.ERROR})

_WORDS: Mapping[str, TestStatus] = {
    "PASSED": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "SKIPPED": TestStatus.SKIPPED,
    "XFAIL": TestStatus.XFAIL,
}
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL) +(\S.*?) *$", re.MULTILINE)
_OPTION = re.compile(r"(.*?)\[(.*)\]")
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_DJANGO_VERSION = "--version is equivalent to version"
_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_DJANGO_BANNER = re.compile(
    r"^(.*?) \.\.\. Testing against Django installed in (?s:.*?) silenced\)\.\nok$", re.MULTILINE
)
_COLOUR = re.compile(r"\[\d+m")
_CONTROL = dict.fromkeys(range(1, 32))


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
        found[name] = TestStatus.FAILED if name in found else _WORDS[word]
    return found


def pytest(log: str) -> Statuses:
    """Read the short summary of `pytest -rA`."""
    return _worst(_summary_lines(log))


def pytest_options(log: str) -> Statuses:
    """Read `pytest -rA` and shorten parameters that are absolute paths to their last part."""
    return _worst((_short_option(name), status) for name, status in _summary_lines(log))


def pytest_coloured(log: str) -> Statuses:
    """Read `pytest -rA` with colours, and the `id STATUS` lines of pytest before `-rA`."""
    found: list[_Line] = []
    for raw in log.split("\n"):
        line = _COLOUR.sub("", raw).translate(_CONTROL)
        if line.startswith(tuple(_WORDS)):
            found.extend(_summary_lines(line))
        elif line.endswith(tuple(_WORDS)):
            words = line.split()
            if len(words) > 1 and words[1] in _WORDS:
                found.append((words[0], _WORDS[words[1]]))
    return _worst(found)


def matplotlib(log: str) -> Statuses:
    """Read `pytest -rA` where enum members stand in ids by name instead of by value."""
    return pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def seaborn(log: str) -> Statuses:
    """Read passes and failures of either pytest layout: `STATUS id` or `id PASSED`."""
    found: list[_Line] = []
    for line in log.split("\n"):
        words = line.split()
        if line.startswith(("FAILED", "PASSED")) and len(words) > 1 and words[0] in _WORDS:
            found.append((words[1], _WORDS[words[0]]))
        elif " PASSED " in line and words[1] == "PASSED":
            found.append((words[0], TestStatus.PASSED))
    return _worst(found)


def sympy(log: str) -> Statuses:
    """Read sympy's own runner: `test_name ok|F|E` lines and the headings of failures."""
    headings = re.findall(r"_* (.*)\.py:(.*) _*", log)
    found = [(f"{path}.py:{name}", TestStatus.FAILED) for path, name in headings]
    endings = {" E": TestStatus.ERROR, " F": TestStatus.FAILED, " ok": TestStatus.PASSED}
    for line in map(str.strip, log.split("\n")):
        for ending, status in endings.items():
            if line.startswith("test_") and line.endswith(ending):
                found.append((line.split()[0], status))
    return _worst(found)


def django(log: str) -> Statuses:
    """Read unittest's verbose lines `test (class) ... ok`, also where other output cuts in."""
    found: list[_Line] = []
    open_test = ""
    for line in map(str.strip, log.split("\n")):
        if _DJANGO_VERSION in line:
            found.append((_DJANGO_VERSION, TestStatus.PASSED))
        if " ... " in line:
            open_test = line.split(" ... ")[0]
        if result := _django_result(line):
            found.append(result)
        if line.startswith("ok") and open_test:
            found.append((open_test, TestStatus.PASSED))
    found.extend((test, TestStatus.PASSED) for test in _DJANGO_BANNER.findall(log))
    return _worst(found)


def _django_result(line: str) -> _Line | None:
    for ending in (" ... ok", " ... OK", " ...  OK"):
        if line.endswith(ending):
            # A migration's own progress may stand before the name of its test.
            shown = line.split("...", 1)[1].strip() if line.startswith(_MIGRATION) else line
            return shown.removesuffix(ending), TestStatus.PASSED
    if " ... skipped" in line:
        return line.split(" ... skipped")[0], TestStatus.SKIPPED
    for word, status in (("FAIL", TestStatus.FAILED), ("ERROR", TestStatus.ERROR)):
        if line.endswith(f" ... {word}"):
            return line.split(f" ... {word}")[0], status
        if line.startswith(f"{word}:") and len(line.split()) > 1:
            return line.split()[1], status
    return None


def r2e(log: str) -> Statuses:
    """Read `pytest -rA` as R2E-Gym names tests: the parts after the file, joined with dots."""
    found: list[_Line] = []
    _, _, summary = _COLOUR_CODE.sub("", log).rpartition("short test summary info")
    for line in summary.split("\n"):
        for word in ("PASSED", "FAILED", "ERROR"):
            if word in line:
                name = ".".join(line.split("::")[1:]).split(" - ")[0]
                found.append((name, _WORDS[word]))
                break
    return _worst(line for line in found if line[0])


def json_report(report: str) -> Statuses:
    """Read `{"tests": [{"name": …, "status": "PASSED"}, …]}`; empty where it is something else."""
    try:
        tests = [(str(test["name"]), str(test["status"])) for test in json.loads(report)["tests"]]
    except (ValueError, TypeError, KeyError):
        return {}
    return _worst((name, _WORDS.get(word.upper(), TestStatus.ERROR)) for name, word in tests)


def _summary_lines(log: str) -> list[_Line]:
    found = []
    for line in log.split("\n"):
        if line.startswith(tuple(_WORDS)):
            words = line.replace(" - ", " ").split() if line.startswith("FAILED") else line.split()
            if len(words) > 1 and words[0] in _WORDS:
                found.append((words[1], _WORDS[words[0]]))
    return found


def _worst(lines: Iterable[_Line]) -> Statuses:
    """Return the last status of each test, unless an earlier one is a failure."""
    found: Statuses = {}
    for name, status in lines:
        if found.get(name) not in _BAD or status in _BAD:
            found[name] = status
    return found


def _short_option(name: str) -> str:
    match = _OPTION.search(name)
    if not match:
        return name
    main, option = match.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.split("/")[-1]
    return f"{main}[{option}]"


PARSERS: Mapping[str, Parser] = {
    "status_lines": status_lines,
    "pytest": pytest,
    "pytest_options": pytest_options,
    "pytest_coloured": pytest_coloured,
    "django": django,
    "json_report": json_report,
    "matplotlib": matplotlib,
    "r2e": r2e,
    "seaborn": seaborn,
    "sympy": sympy,
}
"""Parsers by the name that a Task's `log_parser` gives."""
