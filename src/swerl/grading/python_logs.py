"""Logs of Python's test runners, read by the rules of SWE-bench and R2E-Gym.

An id is the word after its status, so an id with spaces is cut. Other lines are ignored.

If a log of pytest has a summary, statuses come from there on: captured output stands before it, and
a test may print `ERROR x` or log an error. A test may print the heading, too: lines before the last
heading count for tests that are named behind it, so no second heading hides a failure. So do lines
behind pytest's last line, which code prints at its exit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from swerl.core.grade import TestStatus
from swerl.grading.statuses import Line, Statuses, lines, worst

WORDS: Mapping[str, TestStatus] = {
    "PASSED": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "SKIPPED": TestStatus.SKIPPED,
    "XFAIL": TestStatus.XFAIL,
}
_WORDS = tuple(WORDS)
_SUMMARY = re.compile(r"^=+ short test summary info =+", re.MULTILINE)
_SUMMARY_END = re.compile(r"^=+ .*\bin \d+\.\d+s", re.MULTILINE)
_LOG_RECORD = "ERROR  "
"""Start of a logged error; pytest writes one blank behind a status."""
_COUNT = re.compile(r"\[\d+\]")
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_COLOUR = re.compile(r"\[\d+m")
_CONTROL = dict.fromkeys({*range(1, 32)} - {ord("\n")})
_DJANGO_VERSION = "--version is equivalent to version"
_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_DJANGO_SETUP = " ... Testing against Django installed in "
_DJANGO_SETUP_END = re.compile(r" silenced\)\.\nok$", re.MULTILINE)
_DJANGO_CHECKED = " ... System check identified no issues (0 silenced)"
_DJANGO_SERVER_ERROR = " ... Internal Server Error: /"


def pytest(log: str) -> Statuses:
    """Read the short summary of `pytest -rA`."""
    return worst(_summary_lines(_with_subtests(log)))


def pytest_options(log: str) -> Statuses:
    """Read `pytest -rA` and shorten parameters that are absolute paths to their last part."""
    return worst(
        (_short_option(name), status) for name, status in _summary_lines(_with_subtests(log))
    )


def pytest_coloured(log: str) -> Statuses:
    """Read `pytest -rA` with colours, spaces in ids, and the `id STATUS` lines of `-v`.

    A failure's message is cut off; the text after other statuses belongs to the id. An error, as in
    a tear-down, also counts for the id without its message.
    """
    found: list[Line] = []
    plain = _with_subtests(_COLOUR.sub("", log).translate(_CONTROL))
    start = _summary_start(plain)
    verbose = (line for line in plain[:start].split("\n") if line.endswith(_WORDS))
    for line in chain(verbose, filter(None, plain[start:].split("\n"))):
        if line.startswith("FAILED"):
            line = line.split(" - ", 1)[0]
        if not line.startswith(_WORDS) and not line.endswith(_WORDS):
            continue
        if line.startswith(_LOG_RECORD):
            continue
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith(_WORDS):
            if words[0] in WORDS and not _is_count(words):
                name = " ".join(words[1:])
                names = {name, name.split(" - ", 1)[0]} if words[0] == "ERROR" else {name}
                found.extend((each, WORDS[words[0]]) for each in names)
        elif words[-1] in WORDS:
            found.append((" ".join(words[:-1]), WORDS[words[-1]]))
    return worst(found)


def matplotlib(log: str) -> Statuses:
    """Read `pytest -rA` whose ids hold enum members by name instead of by value."""
    return pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def seaborn(log: str) -> Statuses:
    """Read passes and failures of either pytest layout: `STATUS id` or `id PASSED`."""
    found: list[Line] = []
    for line in filter(None, log.split("\n")):
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
    headings = (_sympy_heading(line) for line in log.split("\n") if ".py:" in line)
    found = [(name, TestStatus.FAILED) for name in headings if name]
    endings = {" E": TestStatus.ERROR, " F": TestStatus.FAILED, " ok": TestStatus.PASSED}
    for line in lines(log):
        if line.startswith("test_"):
            found += [(line.split()[0], endings[end]) for end in endings if line.endswith(end)]
    return worst(found)


def django(log: str) -> Statuses:
    """Read unittest's verbose lines `test (class) ... ok`, also with other output between."""
    return worst(_django_lines(log))


def _django_lines(log: str) -> Iterator[Line]:
    open_test: str | None = None
    for line in lines(log):
        if _DJANGO_VERSION in line:
            yield _DJANGO_VERSION, TestStatus.PASSED
        has_result = " ... " in line
        if has_result:
            open_test = line.split(" ... ")[0]
        if has_result or line.startswith(("FAIL:", "ERROR:")):
            yield from _django_results(line)
        if line.startswith("ok") and open_test is not None:
            yield open_test, TestStatus.PASSED
    for test in _django_cut(log):
        yield test, TestStatus.PASSED


def r2e(log: str) -> Statuses:
    """Read `pytest -rA` as R2E-Gym names tests: the parts after the file, joined with dots."""
    found: list[Line] = []
    _, _, summary = _COLOUR_CODE.sub("", log).rpartition("short test summary info")
    for line in _with_subtests(summary).split("\n"):
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
    test, _, result = line.partition(" ... ")
    # The code under test may have printed something in front of the result.
    if result.endswith("ok") and result != "ok":
        yield test, TestStatus.PASSED


def _django_cut(log: str) -> Iterator[str]:
    """Yield the tests whose `ok` is on the line after a message of Django."""
    previous = ""
    for line in log.split("\n"):
        if line == "ok" and previous.endswith(_DJANGO_CHECKED):
            yield previous.removesuffix(_DJANGO_CHECKED)
        elif line == "ok" and previous.endswith("/"):
            name, cut, path = previous.partition(_DJANGO_SERVER_ERROR)
            if cut and path:
                yield name
        previous = line
    # The message of a set-up has several lines.
    position = 0
    while (start := log.find(_DJANGO_SETUP, position)) >= 0:
        end = _DJANGO_SETUP_END.search(log, start)
        if not end:
            break
        yield log[log.rfind("\n", position, start) + 1 or position : start]
        position = end.end()


def _with_subtests(log: str) -> str:
    """Turn lines of failed subtests into lines of the failed test.

    pytest-subtests writes `(n=3) SUBFAIL id - message`, and pytest 9 `SUBFAILED(n=3) id - message`.
    """
    if "SUBFAIL" not in log:
        return log
    return "\n".join(map(_with_failed_subtest, log.split("\n")))


def _with_failed_subtest(line: str) -> str:
    description, mark, rest = line.partition("SUBFAIL")
    name = next((word for word in rest.split() if "::" in word), "")
    if not mark or not name or (description and not description.endswith(" ")):
        return line
    return f"FAILED {rest[rest.index(name) :]}"


def _summary_lines(log: str) -> Iterator[Line]:
    start = _summary_start(log)
    last = start
    for heading in _SUMMARY.finditer(log, start):
        last = heading.start()
    end = len(log)
    if _SUMMARY.match(log, last):
        end = max((each.end() for each in _SUMMARY_END.finditer(log, last)), default=end)
    found = list(_status_lines(log[last:end]))
    named = {name for name, _ in found}
    yield from (line for line in _status_lines(log[start:last]) if line[0] in named)
    yield from found
    yield from (line for line in _status_lines(log[end:]) if line[0] in named)


def _status_lines(text: str) -> Iterator[Line]:
    for line in filter(None, text.split("\n")):
        if line.startswith(_WORDS) and not line.startswith(_LOG_RECORD):
            words = line.replace(" - ", " ").split() if line.startswith("FAILED") else line.split()
            if len(words) > 1 and words[0] in WORDS and not _is_count(words):
                yield words[1], WORDS[words[0]]


def _summary_start(log: str) -> int:
    """Return the position of the first summary; 0 if there is none."""
    heading = _SUMMARY.search(log)
    return heading.start() if heading else 0


def _is_count(words: list[str]) -> bool:
    """Return True for `SKIPPED [2] file:line: reason`, which names no test."""
    return words[0] == "SKIPPED" and bool(_COUNT.fullmatch(words[1]))


def _short_option(name: str) -> str:
    main, _, rest = name.partition("[")
    option, is_closed, _ = rest.rpartition("]")
    if not is_closed:
        return name
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.split("/")[-1]
    return f"{main}[{option}]"
