"""Logs of Python's test runners, read by the rules of SWE-bench and R2E-Gym.

An id is the word after its status, so an id with spaces is cut. Other lines are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from swerl.core.grade import TestStatus
from swerl.grading.statuses import Line, Statuses, worst

WORDS: Mapping[str, TestStatus] = {
    "PASSED": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "SKIPPED": TestStatus.SKIPPED,
    "XFAIL": TestStatus.XFAIL,
}
_OPTION = re.compile(r"(.*?)\[(.*)\]")
_COUNT = re.compile(r"\[\d+\]")
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_COLOUR = re.compile(r"\[\d+m")
_CONTROL = dict.fromkeys(range(1, 32))
_DJANGO_VERSION = "--version is equivalent to version"
_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_DJANGO_CUT = [
    re.compile(rf"^(.*?)\s\.\.\.\s{cut}\nok$", re.MULTILINE)
    for cut in (
        r"Testing against Django installed in (?s:.*?) silenced\)\.",
        r"Internal Server Error: /.*/",
        r"System check identified no issues \(0 silenced\)",
    )
]
"""Messages of Django between a test's name and its `ok`."""


def pytest(log: str) -> Statuses:
    """Read the short summary of `pytest -rA`."""
    return worst(_summary_lines(log))


def pytest_options(log: str) -> Statuses:
    """Read `pytest -rA` and shorten parameters that are absolute paths to their last part."""
    return worst((_short_option(name), status) for name, status in _summary_lines(log))


def pytest_coloured(log: str) -> Statuses:
    """Read `pytest -rA` with colours, spaces in ids, and the `id STATUS` lines of `-v`.

    A failure's message is cut off; the text after other statuses belongs to the id. An error, as in
    a tear-down, also counts for the id without its message.
    """
    found: list[Line] = []
    for raw in log.split("\n"):
        line = _COLOUR.sub("", raw).translate(_CONTROL)
        if line.startswith("FAILED"):
            line = line.split(" - ", 1)[0]
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith(tuple(WORDS)):
            if words[0] in WORDS and not _is_count(words):
                name = " ".join(words[1:])
                names = {name, name.split(" - ", 1)[0]} if words[0] == "ERROR" else {name}
                found.extend((each, WORDS[words[0]]) for each in names)
        elif line.endswith(tuple(WORDS)) and words[-1] in WORDS:
            found.append((" ".join(words[:-1]), WORDS[words[-1]]))
    return worst(found)


def matplotlib(log: str) -> Statuses:
    """Read `pytest -rA` whose ids hold enum members by name instead of by value."""
    return pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def seaborn(log: str) -> Statuses:
    """Read passes and failures of either pytest layout: `STATUS id` or `id PASSED`."""
    found: list[Line] = []
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith("FAILED"):
            found.append((words[1], TestStatus.FAILED))
        elif " PASSED " in line:
            if words[1] == "PASSED":
                found.append((words[0], TestStatus.PASSED))
        elif line.startswith("PASSED"):
            found.append((words[1], TestStatus.PASSED))
    return worst(found)


def sympy(log: str) -> Statuses:
    """Read sympy's own runner: `test_name ok|F|E` lines and the headings of failures."""
    lines = log.split("\n")
    found = [(name, TestStatus.FAILED) for name in map(_sympy_heading, lines) if name]
    endings = {" E": TestStatus.ERROR, " F": TestStatus.FAILED, " ok": TestStatus.PASSED}
    for line in map(str.strip, lines):
        for ending, status in endings.items():
            if line.startswith("test_") and line.endswith(ending):
                found.append((line.split()[0], status))
    return worst(found)


def django(log: str) -> Statuses:
    """Read unittest's verbose lines `test (class) ... ok`, also with other output between."""
    found: list[Line] = []
    open_test: str | None = None
    for line in map(str.strip, log.split("\n")):
        if _DJANGO_VERSION in line:
            found.append((_DJANGO_VERSION, TestStatus.PASSED))
        if " ... " in line:
            open_test = line.split(" ... ")[0]
        found.extend(_django_results(line))
        if line.startswith("ok") and open_test is not None:
            found.append((open_test, TestStatus.PASSED))
    for cut in _DJANGO_CUT:
        found.extend((test, TestStatus.PASSED) for test in cut.findall(log))
    return worst(found)


def r2e(log: str) -> Statuses:
    """Read `pytest -rA` as R2E-Gym names tests: the parts after the file, joined with dots."""
    found: list[Line] = []
    _, _, summary = _COLOUR_CODE.sub("", log).rpartition("short test summary info")
    for line in summary.split("\n"):
        for word in ("PASSED", "FAILED", "ERROR"):
            if word in line:
                name = ".".join(line.split("::")[1:]).split(" - ")[0]
                found.append((name, WORDS[word]))
                break
    return worst(line for line in found if line[0])


def _sympy_heading(line: str) -> str:
    """Return the id in a line such as `____ path.py:test ____`; empty for other lines."""
    first, last = line.find(" "), line.rfind(" ")
    middle = line.rfind(".py:", first + 1, last)
    return line[first + 1 : last] if 0 <= first < middle else ""


def _django_results(line: str) -> Iterator[Line]:
    for ending in (" ... ok", " ... OK", " ...  OK"):
        if line.endswith(ending):
            if line.startswith(_MIGRATION):
                # A migration prints its progress before the name of its test.
                line = line.split("...", 1)[1].strip()
            yield line.removesuffix(ending), TestStatus.PASSED
            break
    if " ... skipped" in line:
        yield line.split(" ... skipped")[0], TestStatus.SKIPPED
    for word, status in (("FAIL", TestStatus.FAILED), ("ERROR", TestStatus.ERROR)):
        if line.endswith(f" ... {word}"):
            yield line.split(f" ... {word}")[0], status
        if line.startswith(f"{word}:") and len(line.split()) > 1:
            yield line.split()[1], status


def _summary_lines(log: str) -> Iterator[Line]:
    for line in log.split("\n"):
        if line.startswith(tuple(WORDS)):
            words = line.replace(" - ", " ").split() if line.startswith("FAILED") else line.split()
            if len(words) > 1 and words[0] in WORDS and not _is_count(words):
                yield words[1], WORDS[words[0]]


def _is_count(words: list[str]) -> bool:
    """Return True for `SKIPPED [2] file:line: reason`, which names no test."""
    return words[0] == "SKIPPED" and bool(_COUNT.fullmatch(words[1]))


def _short_option(name: str) -> str:
    match = _OPTION.search(name)
    if not match:
        return name
    main, option = match.groups()
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.split("/")[-1]
    return f"{main}[{option}]"
