"""Test logs to statuses per test id: one parser per test runner.

The rules are those of SWE-bench, so that verdicts agree, with one difference: if lines about a test
disagree, the worst one counts. Runners list failures last, so an honest log reads the same. Code
under test cannot hide a failure by a line of its own.

Code under test writes the log, so nothing about it is known but its size. Every parser takes linear
time. A small log is read at once; a large one would hold up the event loop, so a child process
reads it. The kernel ends the child past its limits, also in the middle of a pattern.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import islice
from operator import attrgetter
from typing import Any

from swerl.core.errors import SwerlError, unknown
from swerl.core.grade import TestStatus
from swerl.grading import python_logs
from swerl.grading.statuses import MAX_TESTS, Parser, Statuses, worst

_INLINE_CHARS = 1 << 16
"""Largest log that the event loop reads itself. It takes 30 ms at most, a child process over 50 ms,
and most logs are smaller."""
_LIMIT_S = 4.0
"""Default limit of a child process: twice the CPU time of the slowest parser for 8 MiB, the largest
log that a sandbox returns."""
_CHILD = (
    *("-I", "-X", "utf8", "-c"),
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from swerl.grading.log_parsers import read_in_child as read; "
    "read(sys.argv[1], int(sys.argv[2]))",
)
_MEMORY_BYTES = 4 << 30
_PART_TESTS = 5_000
_LINE = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL) +(\S.*)")


async def read_log(parse: Parser, log: str, limit_s: float = _LIMIT_S) -> Statuses:
    """Read a log with a parser that is a function of a module. Raises LogError.

    `limit_s` is CPU time, which other work on the machine does not use up, in whole seconds.
    """
    address = address_of(parse)
    if len(log) <= _INLINE_CHARS:
        return parse_log(parse, log)
    statuses = {each.value: each for each in TestStatus}
    found: Statuses = {}
    async for part in _read_apart(address, log, limit_s):
        found.update((name, statuses[status]) for name, status in part.items())
    return found


async def _read_apart(address: str, log: str, limit_s: float) -> AsyncIterator[dict[str, Any]]:
    """Read a log in a child process and yield its result in parts. Raises LogError."""
    # The child imports this module, too, without need of asyncio, which takes as long as the rest.
    import asyncio

    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *_CHILD, address, str(max(1, round(limit_s))), *sys.path),
        env={},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await child.communicate(log.encode("utf-8", "surrogatepass"))
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise LogError(f"reading it takes more than {limit_s:g} s of CPU time")
    if child.returncode:
        lines = err.decode("utf-8", "replace").strip().splitlines()
        raise LogError((lines or [f"the parser ended with exit code {child.returncode}"])[-1])
    *parts, last = out.splitlines()
    if problem := json.loads(last):
        raise LogError(problem)
    for part in parts:
        yield json.loads(part)
        # One part takes milliseconds; other work on the event loop runs in between.
        await asyncio.sleep(0)


def find_parser(name: str) -> Parser:
    """Return the parser of this name. Raises UnknownNameError with the nearest names."""
    if name not in PARSERS:
        raise unknown("log parser", name, PARSERS)
    found: Parser = getattr(importlib.import_module(PARSERS[name]), name)
    return found


class LogError(SwerlError, RuntimeError):
    """A log cannot be read. Code under test wrote it, so this is no fault of the infrastructure."""


def parse_log(parse: Callable[[str], dict[str, Any]], log: str) -> dict[str, Any]:
    """Read a log. Raises LogError for every error of the parser."""
    try:
        return parse(log)
    except Exception as error:
        raise LogError(f"{type(error).__name__}: {error}") from error


def address_of(parse: Callable[[str], object]) -> str:
    """Return the place of a parser. Raises TypeError if no other process can import it."""
    for name in PARSERS:
        if find_parser(name) is parse:
            return f"{__name__}:{name}"
    address = f"{parse.__module__}:{parse.__qualname__}"
    if "<" in address:
        raise TypeError(f"the parser {address} must be a function of a module")
    return address


def read_in_child(address: str, limit_s: int) -> None:
    """Read the log on standard input with the parser at this address; print its result.

    Each line is a JSON object with some of the tests. The last line is a JSON string: the error, or
    nothing.
    """
    # Past the limit the kernel kills this process, whatever a pattern is doing.
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    module, _, name = address.partition(":")
    place = importlib.import_module(PARSERS[name] if module == __name__ else module)
    parse, problem = attrgetter(name)(place), ""
    found: dict[str, Any] = {}
    try:
        found = parse_log(parse, sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
        if len(found) > MAX_TESTS:
            raise LogError(f"it names more than {MAX_TESTS:,} tests")
    except LogError as error:
        found, problem = {}, str(error)
    items = iter(found.items())
    while part := dict(islice(items, _PART_TESTS)):
        sys.stdout.write(f"{json.dumps(part)}\n")
    sys.stdout.write(f"{json.dumps(problem)}\n")


def unsupported(kinds: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Return how many Tasks need a grader or log parser that is not installed, by reason.

    `kinds` maps (grader, log parser) to a number of Tasks. The most frequent reason comes first.
    """
    from swerl.core import plugins

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
    for line in filter(None, log.split("\n")):
        if match := _LINE.fullmatch(line.rstrip(" ")):
            word, name = match.groups()
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
    "jest", "jest_json", "vitest", "karma", "tap", "maven", "gradle", "ant", "redis", "jq", "cargo",
    "doctest", "micropython", "googletest", "go_test", "cargo_modes", "phpunit", "minitest",
    "cucumber", "ruby_unit", "rspec", "phpunit_timed", "gradle_timed", "junit", "ctest", "swift",
    "test_lines", "minitest_methods", "elixir", "xunit", "plenary", "mocha", "mocha_headings",
)
# fmt: on
PARSERS: Mapping[str, str] = {
    **dict.fromkeys(("status_lines", "json_report"), __name__),
    **dict.fromkeys(_PYTHON, "swerl.grading.python_logs"),
    **dict.fromkeys(_OTHERS, "swerl.grading.runner_logs"),
}
"""Name of a parser, as a Task's `log_parser` gives it -> the module of the function of that name.
Most runs need few parsers, so a module is imported at its first use."""
