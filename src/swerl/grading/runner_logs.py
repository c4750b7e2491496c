"""Logs of test runners other than Python's, read by the rules of SWE-bench.

Runners that SWE-bench does not know follow the rules of SWE-rebench V2, in the last part.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from itertools import chain

from swerl.core.grade import TestStatus
from swerl.grading.statuses import Line, Parser, Statuses, by_line, lines, without_half_lines, worst

_PASSED, _FAILED, _SKIPPED = TestStatus.PASSED, TestStatus.FAILED, TestStatus.SKIPPED

_KARMA_LINE = re.compile(r"(?P<indent>\s*)(?P<mark>[✔✖])?\s(?P<name>.*)")

_CROSS = "\N{MULTIPLICATION SIGN}"

_jest_lines = by_line(
    r"(?P<status>[✓✕○])\s(?P<name>.+?)(?:\s\(\d+(?:\.\d+)?\s*m?s\))?$",
    {"✓": _PASSED, "✕": _FAILED, "○": _SKIPPED},
)

jest_json = by_line(
    r"\[(?P<status>PASSED|FAILED)\]\s(?P<name>.+)",
    {"PASSED": _PASSED, "FAILED": _FAILED},
)
"""Read `[PASSED] name` lines, which SWE-bench's commands make of `jest --json`."""

vitest = by_line(
    rf"(?P<status>[✓{_CROSS}↓])\s(?P<name>.+?)(?:\s(?:\d+\s*m?s?|\[skipped\]))?$",
    {"✓": _PASSED, _CROSS: _FAILED, "↓": _SKIPPED},
)
"""Read `vitest --reporter=verbose`."""

tap = by_line(
    r"(?P<status>ok|not ok) \d+ (?P<name>.+)",
    {"ok": _PASSED, "not ok": _FAILED},
    begins=r"(?:not )?ok \d+ ",
)
"""Read the Test Anything Protocol; the name is the text after the number, with directives."""


def jest(log: str) -> Statuses:
    """Read `jest --verbose`; names do not hold the suites."""
    return worst((name.strip(), status) for name, status in _jest_lines(log).items())


def karma(log: str) -> Statuses:
    """Read karma's mocha reporter: `suite > … > test`, until its summary."""
    return worst(_karma_lines(log))


def _karma_lines(log: str) -> Iterator[Line]:
    suites: list[str] = []
    depth = -1
    started = False
    for line in filter(None, log.split("\n")):
        if line.startswith("SUMMARY:"):
            return
        if "Starting browser" in line:
            started = True
            continue
        match = _KARMA_LINE.match(line)
        if not match or not started:
            continue
        indent, mark, name = match["indent"], match["mark"], match["name"]
        if mark:
            yield " > ".join([*suites, name]), _PASSED if mark == "✔" else _FAILED
        elif indent and len(indent) > depth:
            suites.append(name)
            depth = len(indent)
        elif indent and len(indent) < depth:
            # A line further left closes one suite and opens none, as in SWE-bench.
            suites[-1:] = []
            depth = len(indent)


_MAVEN_TEST = re.compile(r".*-Dtest=(\S+)")
_MAVEN_RESULT = re.compile(r".*BUILD (SUCCESS|FAILURE)$")
_GRADLE_LINE = re.compile(r"([^>].+)\s(PASSED|FAILED)$")
_GRADLE_NAME = re.compile(r"([^>]\S*\s+>\s+\S+)$")
_GRADLE_WORDS = ("PASSED", "FAILED")
_JVM_WORDS = {
    "PASS": _PASSED,
    "FAIL": _FAILED,
    "ERR": _FAILED,
    "PASSED": _PASSED,
    "FAILED": _FAILED,
    "SUCCESS": _PASSED,
    "FAILURE": _FAILED,
}

ant = by_line(r"\[junit\]\s+\[(?P<status>PASS|FAIL|ERR)\]\s+(?P<name>.*)", _JVM_WORDS)
"""Read the lines `[junit] [PASS] test` of ant."""


def maven(log: str) -> Statuses:
    """Read `mvn -Dtest=NAME` commands in the shell's trace, and the result of each.

    Maven names no passing test, so every test has a command of its own; the n-th result is the n-th
    command's. Results before the first command belong to a build. If there are more results than
    commands, Maven did not write all of them.
    """
    tests, results = list[str](), list[str]()
    for line in lines(log):
        if "-Dtest=" in line and (match := _MAVEN_TEST.match(line)):
            tests.append(match[1])
        if tests and "BUILD " in line and (match := _MAVEN_RESULT.match(line)):
            results.append(match[1])
    if len(results) > len(tests):
        return dict.fromkeys(tests, _FAILED)
    return worst((test, _JVM_WORDS[word]) for test, word in zip(tests, results, strict=False))


def gradle(log: str) -> Statuses:
    """Read lines `class > test PASSED`; the status may be on a later line."""
    return worst(_gradle_lines(log))


def _gradle_lines(log: str) -> Iterator[Line]:
    open_test = ""
    for line in lines(log):
        if line.endswith(_GRADLE_WORDS) and (match := _GRADLE_LINE.match(line)):
            yield match[1], _JVM_WORDS[match[2]]
            open_test = ""
        elif ">" in line and (match := _GRADLE_NAME.match(line)):
            open_test = match[1]
        elif open_test and line in _GRADLE_WORDS:
            yield open_test, _JVM_WORDS[line]
            open_test = ""


_DOCTEST_START, _DOCTEST_END = "<doctest", "</doctest>"
_PHP_SUITE = re.compile(r"(\w.+) \(.+\)")
_PHP_TEST = re.compile(r"\s*([✔✘↩])\s*(.*)")
_PHP_MARKS = {"✔": _PASSED, "✘": _FAILED, "↩": _SKIPPED}
_REDIS_FILE = re.compile(r"(?<!\s)\s+in\s+\S+$")
_GOOGLETEST_TIMED = re.compile(r"(.*)\s\(.*\)$")
_GOOGLETEST_LINE = re.compile(r".*\[\s*(OK|FAILED)\s*\]\s(.*)")
_MINITEST_WORDS = {".": _PASSED, "F": _FAILED, "E": _FAILED}

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

go_test = by_line(
    r"(?=.*\)$)--- (?P<status>PASS|FAIL|SKIP): (?P<name>.+) \(.+\)$",
    {"PASS": _PASSED, "FAIL": _FAILED, "SKIP": _SKIPPED},
    begins=r"--- (?:PASS|FAIL|SKIP): ",
)
"""Read `go test -v`, subtests included."""

cargo = by_line(
    r"test\s+(?P<name>\S+)\s+\.\.\.\s+(?P<status>ok|FAILED)$", {"ok": _PASSED, "FAILED": _FAILED}
)
"""Read `cargo test` without ignored tests."""

cargo_modes = by_line(
    r"test (?P<name>\S+(?: - (?!should panic)[^\s(]+)?)(?: -)?(?: \(line \d+\))?"
    r"(?: - [a-z]+(?: [a-z]+)?)? \.\.\. (?P<status>ok|FAILED)$",
    {"ok": _PASSED, "FAILED": _FAILED},
)
"""Read `cargo test` with tests that should panic and doctests, without their lines, which move."""

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
    """Read `[ok]: test` lines; a failure's line also holds the file, which the id does not."""
    return worst(
        (_REDIS_FILE.sub("", name) if status is _FAILED else name, status)
        for name, status in _redis_lines(log).items()
    )


def googletest(log: str) -> Statuses:
    """Read lines `[ OK ] suite.test (0 ms)`; lines of the summary have no time."""
    timed = (_GOOGLETEST_TIMED.match(line) for line in lines(log) if line.endswith(")"))
    found = (_GOOGLETEST_LINE.match(each[1]) for each in timed if each)
    return worst((each[2], _PASSED if each[1] == "OK" else _FAILED) for each in found if each)


def minitest(log: str) -> Statuses:
    """Read `name. = 0.01 s = .`: the last dot, F or E of a line counts."""
    return worst(_minitest_lines(log))


def _minitest_lines(log: str) -> Iterator[Line]:
    for line in lines(log):
        if "=" not in line or ". " not in line:
            continue
        end = max(map(line.rfind, _MINITEST_WORDS))
        name = line[: max(end, 0)].rpartition("=")[0].rpartition(". ")[0]
        if name:
            yield name, _MINITEST_WORDS[line[end]]


def doctest(log: str) -> Statuses:
    """Read the XML reports of C++'s doctest: a subcase passes if all its expressions do."""
    return worst(_doctest_lines(log))


def _doctest_lines(log: str) -> Iterator[Line]:
    for piece in log.split(_DOCTEST_END)[:-1]:
        _, start, report = piece.partition(_DOCTEST_START)
        cases = _DoctestReport()
        parser = ElementTree.XMLParser(target=cases)
        try:
            parser.feed(f"{start}{report}{_DOCTEST_END}")
            parser.close()
        except ElementTree.ParseError:
            continue
        for case, name, status in cases.found:
            yield f"{case} > {name}", status


class _DoctestReport:
    """Collects the subcases of one report of C++'s doctest. Implements an XML parser's target."""

    def __init__(self) -> None:
        self.found: list[tuple[str | None, str | None, TestStatus]] = []
        """Case, subcase and status."""
        self._cases: list[str | None] = []
        self._parts: list[tuple[str | None, bool]] = []
        """Name of each open subcase, and whether all its expressions so far pass."""

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "TestCase":
            self._cases.append(attributes.get("name"))
        elif tag == "SubCase" and self._cases:
            self._parts.append((attributes.get("name"), True))
        elif tag == "Expression" and self._parts and attributes.get("success") != "true":
            self._parts[-1] = self._parts[-1][0], False

    def end(self, tag: str) -> None:
        if tag == "TestCase":
            self._cases.pop()
        elif tag == "SubCase" and self._cases:
            name, is_good = self._parts.pop()
            self.found.append((self._cases[-1], name, _PASSED if is_good else _FAILED))
            # A failure inside a subcase also fails the subcases around it.
            if self._parts and not is_good:
                self._parts[-1] = self._parts[-1][0], False

    def close(self) -> None:
        """Do nothing: the subcases are in `found`."""


def phpunit(log: str) -> Statuses:
    """Read `phpunit --testdox` without colours, whose layout differs: `suite > test`."""
    return worst(_php_lines(log))


def _php_lines(log: str) -> Iterator[Line]:
    suite: str | None = None
    marks = "".join(_PHP_MARKS)
    for line in filter(None, without_half_lines(log, rf" [{marks}] ").split("\n")):
        if line.endswith(")") and (match := _PHP_SUITE.fullmatch(line)):
            suite = match[1]
        elif match := _PHP_TEST.fullmatch(line):
            yield f"{suite} > {match[2]}", _PHP_MARKS[match[1]]


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Durations are matched from the right, on the reversed name: a search would try every position.
_TIME = re.compile(r"\s*+(?:\)\s*+)?+sm?+\s*+\d++(?:\.\d++)?+(?:\s*+\()?+\s*+", re.IGNORECASE)
_PHP_TIME = re.compile(r"\s*+\]\s*+sm?+\s*+\d++(?:\.\d++)?+\s*+\[\s*+", re.IGNORECASE)
_ATTRIBUTE = re.compile(r'\b(\w++)="([^"]*)"')
_JUNIT_MARKS = {"<failure": _FAILED, "<error": TestStatus.ERROR, "<skipped": _SKIPPED}

gradle_timed = by_line(
    r"(?P<name>[^>].+?)(?<!\s)\s++(?P<status>PASSED|FAILED)(?:\s++\(\d++(?:\.\d++)?+s\))?$",
    {"PASSED": _PASSED, "FAILED": _FAILED},
)
"""Read lines `class > test PASSED (0.1s)` of gradle."""

ctest = by_line(
    r"\d+/\d+\s+Test\s+#\d+:\s++(?P<name>.+?)(?<!\s)\s++\.++\s*+(?:[\w ]*+\*\*\*)?"
    r"(?P<status>Passed|Failed|Skipped|Timeout|Exception|Not Run(?! \(Disabled))\b",
    {"Passed": _PASSED, "Skipped": _SKIPPED}
    | dict.fromkeys(("Failed", "Timeout", "Exception", "Not Run"), _FAILED),
)
"""Read `1/2 Test #1: name .... Passed` and `2/2 Test #2: name ....***Failed` of CMake's ctest."""

test_lines = by_line(
    r"Test\s++(?P<name>.*?)(?<!\s)\s++(?P<status>passed|failed|skipped)$",
    {"passed": _PASSED, "failed": _FAILED, "skipped": _SKIPPED},
)
"""Read lines `Test name passed`."""

_METHOD_WORDS = {".": _PASSED, "F": _FAILED, "E": _FAILED, "S": _SKIPPED}
_METHOD = re.compile(r"([^#]++#.+?)(?<!\s)\s++=(?:\s|$)")
_METHOD_END = re.compile(r"(?<![\d.])[\d.]++\s++s\s++=\s++([.FES])$")


def minitest_methods(log: str) -> Statuses:
    """Read minitest's `Class#method = 0.01 s = .`; what the test prints stands in its middle."""
    return worst(_method_lines(log))


def _method_lines(log: str) -> Iterator[Line]:
    name = ""
    for line in lines(log):
        if begun := _METHOD.match(line):
            name = begun[1]
        if name and (ended := _METHOD_END.search(line)):
            yield name, _METHOD_WORDS[ended[1]]
            name = ""


swift = by_line(
    r"Test Case '(?P<name>[^']+)'\s+(?P<status>passed|failed)\s+\([0-9.]+\s+seconds\)$",
    {"passed": _PASSED, "failed": _FAILED},
)
"""Read XCTest of Swift."""


def _by_rules(first: str, *rules: tuple[str, TestStatus], is_timed: bool = False) -> Parser:
    """Return a parser that reads each line by the first rule that matches.

    `first` is a pattern of the characters that such a line may begin with, so that most lines need
    one look. `is_timed` removes durations from the names.
    """
    statuses = [status for _, status in rules]

    def parse(log: str) -> Statuses:
        return worst(named(log))

    def named(log: str) -> Iterator[Line]:
        can_match = re.compile(first).match
        match_any = re.compile("|".join(pattern for pattern, _ in rules)).match
        for match in map(match_any, filter(can_match, lines(_ANSI.sub("", log)))):
            # Each rule has one group, so the number of the last group is that of the rule.
            if match and (rule := match.lastindex):
                name = _without_time(_TIME, match[rule]) if is_timed else match[rule].strip()
                if name:
                    yield name, statuses[rule - 1]

    return parse


def _without_time(reversed_time: re.Pattern[str], name: str) -> str:
    """Return a stripped name without the duration that it ends with."""
    match = reversed_time.match(name[::-1])
    return name[: len(name) - match.end()].strip() if match else name.strip()


elixir = _by_rules(
    r"[*\d]",
    (r"\*\s+test\s++(.*?)(?<!\s)\s++\(skipped\)\s++\[L#\d++\]$", _SKIPPED),
    (r"\d+\)\s+test\s++(.*?)(?<!\s)\s++\([^()]++\)$", _FAILED),
    (r"\*\s+test\s++(.*?)(?<!\s)(?:\s++\([\d.]++ms\))?\s++\[L#\d++\]$", _PASSED),
)
"""Read `mix test --trace` of Elixir."""

xunit = _by_rules(
    r"\[x|Failed|Skipped|Passed",
    (r"\[xUnit\.net\s+[\d:.]+\]\s++(.+?)(?<!\s)\s++\[FAIL\]$", _FAILED),
    (r"(?=.*\]$)Failed\s++(.+?)(?<!\s)\s++\[.+?\]$", _FAILED),
    (r"(?=.*\]$)Skipped\s++(.+?)(?<!\s)\s++\[.+?\]$", _SKIPPED),
    (r"Skipped\s+(.+)$", _SKIPPED),
    (r"(?=.*\]$)Passed\s++(.+?)(?<!\s)\s++\[.+?\]$", _PASSED),
)
"""Read xUnit.net of C#."""

plenary = _by_rules(
    r"[FSs]",
    (r"Fail(?:ed)?\s*\|\|\s*(.+)", _FAILED),
    (r"(?i:skip(?:ped)?)\s*\|\|\s*(.+)", _SKIPPED),
    (r"Success\s*\|\|\s*(.+)", _PASSED),
)
"""Read Neovim's plenary: `Success || name`."""

mocha = _by_rules(
    r"[-\d✔]",
    (r"-\s+(.*)", _SKIPPED),
    (r"\d+\)\s+(.*)", _FAILED),
    (r"✔\s+(.*)", _PASSED),
    is_timed=True,
)
"""Read mocha's `✔ name`, `1) name` and `- name`, without durations."""

mocha_headings = _by_rules(
    r"[-\d\[✔]",
    (r"-\s+(.*)", _SKIPPED),
    (r"\d+\)\s++(.*?):$", _FAILED),
    (r"\[W\]\s*\d+\)\s+(.*)", _FAILED),
    (r"✔\s+(.*)", _PASSED),
    is_timed=True,
)
"""Read mocha; a failure counts by the heading `1) name:` of its details."""


def phpunit_timed(log: str) -> Statuses:
    """Read `phpunit --testdox` and drop durations from names."""
    return worst((_without_time(_PHP_TIME, name), s) for name, s in _php_lines(log))


def junit(log: str) -> Statuses:
    """Read every `<testcase>` of JUnit reports in the log: `class name`.

    A test's own output stands in a CDATA section, where no pass counts. A failure counts wherever
    it stands, so that output cannot hide one.
    """
    first, *others = log.split("<![CDATA[")
    if not others:
        return worst(_junit_cases(log))
    reported = _junit_cases(first + "".join(part.partition("]]>")[2] for part in others))
    return worst(chain((line for line in _junit_cases(log) if line[1].fails), reported))


def _junit_cases(text: str) -> Iterator[Line]:
    for case in text.split("<testcase")[1:]:
        tag, _, rest = case.partition(">")
        body = "" if tag.endswith("/") else rest.partition("</testcase>")[0]
        attributes = dict(_ATTRIBUTE.findall(tag))
        if name := attributes.get("name"):
            marks = (status for mark, status in _JUNIT_MARKS.items() if mark in body)
            yield f"{attributes.get('classname', '')} {name}".strip(), next(marks, _PASSED)
