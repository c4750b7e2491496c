"""The steps that every grader shares: prepare the work tree, run the tests, read, judge.

The test command runs between two markers, each with a random word of its own that reaches the
shell over its standard input: no argument list or environment in the sandbox shows them. What
tests print goes out of the sandbox as it comes, so that nothing can take it back, and the exit
code that the sandbox tells must be the one that stands in the last marker.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from swerl.errors import SandboxError, UnknownNameError
from swerl.grade import Canary, Grade, TestStatus, Verdict
from swerl.graders import _canary
from swerl.graders._log_parsers import Parser
from swerl.graders._prepare import Prepared, prepare
from swerl.graders._verdict import Judgement
from swerl.interfaces import Sandbox
from swerl.sandbox import Exec
from swerl.task import GradingSpec, Task

_LOG_CHARS = 200_000
"""Characters of the test log that a Grade keeps, half from each end."""
_PYTEST_OPTIONS = "--durations=0"
_DURATION = re.compile(r"^\s*(\d+\.\d+)s (?:call|setup|teardown)\s+(\S.*?)\s*$", re.MULTILINE)

_RUN = """{{
exec </dev/null 2>&1
printf '\\n%s\\n' '{start}'
bash -c "$1"
code=$?
printf '\\n%s %s\\n' '{end}' "$code"
exit "$code"
}}
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What the test command left."""

    statuses: Mapping[str, TestStatus]
    exit_code: int
    canary: Canary


Judge: TypeAlias = Callable[[GradingSpec, Report], Judgement]
ChooseParser: TypeAlias = Callable[[GradingSpec], Parser]


async def grade(
    task: Task, patch: str, sandbox: Sandbox, parser: ChooseParser, judge: Judge
) -> Grade:
    """Grade a patch in a clean sandbox; what breaks on the way becomes a Verdict of its own."""
    started = time.monotonic()
    prepared = Prepared()
    try:
        parse = parser(task.grading)
        prepared = await prepare(task, patch, sandbox)
        result = prepared.failure or await _test(task, sandbox, parse, judge, prepared.canaries)
    except UnknownNameError as error:
        result = Grade(Verdict.INVALID, reason=str(error))
    except SandboxError as error:
        result = Grade(Verdict.INFRA, reason=f"the sandbox failed: {error}")
    return replace(
        result,
        restored=prepared.restored,
        log=_capped(result.log),
        duration_s=time.monotonic() - started,
    )


async def _test(
    task: Task, sandbox: Sandbox, parse: Parser, judge: Judge, canaries: tuple[str, ...]
) -> Grade:
    start, end = secrets.token_hex(16), secrets.token_hex(16)
    spec = task.grading
    done = await sandbox.run(
        ["bash", "-s", "--", spec.test_command],
        cwd=task.workdir,
        env=_environment(spec),
        timeout_s=spec.timeout_s,
        stdin=_RUN.format(start=start, end=end).encode(),
    )
    _, began, rest = done.text.partition(f"{start}\n")
    log, ended, tail = rest.rpartition(f"\n{end} ")
    facts = Grade(Verdict.UNSOLVED, log=rest if began else done.text, test_s=done.duration_s)
    if done.timed_out:
        reason = f"the tests ran past {spec.timeout_s:g} s"
        return replace(facts, verdict=Verdict.TIMEOUT, reason=reason)
    if not began:
        reason = f"the test command did not start (exit code {done.exit_code})"
        return replace(facts, verdict=Verdict.INFRA, reason=reason)
    if not ended or tail.strip() != str(done.exit_code):
        return replace(facts, reason=f"{_cut(done)} before its end marker")
    statuses, canary = _canary.separate(parse(log), canaries)
    said = believed(spec, judge(spec, Report(statuses, done.exit_code, canary)), canary)
    return replace(
        facts,
        verdict=said.verdict,
        reason=said.reason,
        tests=said.tests,
        canary=canary,
        durations=_durations(log),
        log=log,
    )


def believed(spec: GradingSpec, said: Judgement, canary: Canary) -> Judgement:
    """Return the Judgement, unless the canaries show that the report is not to be believed."""
    if canary is Canary.PASSED:
        reason = "a test that was made to fail is reported as passed: the report is forged"
        return replace(said, verdict=Verdict.CHEAT, reason=reason)
    if canary is Canary.MISSING and said.verdict is Verdict.SOLVED:
        verdict = Verdict.CHEAT if spec.canary else Verdict.UNSOLVED
        reason = "a test that was made to fail is not in the report, so nothing in it counts"
        return replace(said, verdict=verdict, reason=reason)
    return said


def _cut(done: Exec) -> str:
    return "the output was cut" if done.truncated else "the test command was killed"


def _environment(spec: GradingSpec) -> Mapping[str, str]:
    """Return the environment of the tests, in which pytest tells how long each one took."""
    options = f"{spec.env.get('PYTEST_ADDOPTS', '')} {_PYTEST_OPTIONS}".strip()
    return {**spec.env, "PYTEST_ADDOPTS": options}


def _durations(log: str) -> dict[str, float]:
    """Return seconds by test, set-up and teardown included, from pytest's own table."""
    found: dict[str, float] = {}
    for seconds, test in _DURATION.findall(log):
        found[test] = round(found.get(test, 0.0) + float(seconds), 3)
    return found


def _capped(log: str) -> str:
    if len(log) <= _LOG_CHARS:
        return log
    half = _LOG_CHARS // 2
    return f"{log[:half]}\n[{len(log) - 2 * half} characters left out]\n{log[-half:]}"
