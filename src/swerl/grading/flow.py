"""The flow of every grader: prepare the work tree, run the tests, read the report, judge.

The test command runs between two markers. Each holds a random word that reaches the shell over its
standard input, so no argument list or environment in the sandbox shows it. The tests' output leaves
the sandbox at once, so that no code can take it back. The exit code that the sandbox reports must
equal the one in the last marker.

A report counts only if it can still show a failure (`canary.py`). If the Task declares tests,
the canaries are among them. If only a number or an exit code decides, a solved run is followed by a
second run with canaries, which must not be solved; it has its own clean sandbox if there is one.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from swerl.core.contracts import Fresh, Sandbox
from swerl.core.errors import SandboxError, SandboxLostError, UnknownNameError
from swerl.core.grade import Canary, Grade, TestStatus, Verdict
from swerl.core.task import GradingSpec, Task
from swerl.grading import canary as _canary
from swerl.grading.log_parsers import find_parser
from swerl.grading.prepare import bring_files, can_plant, plant, prepare
from swerl.grading.statuses import Judgement, Parser

_LOG_CHARS = 200_000
"""Characters of the test log that a Grade keeps, half from each end."""
_REPORT_S = 120.0
"""Seconds for the command that makes a report of a log."""
_PYTEST_OPTIONS = "--durations=0"
_DURATION = re.compile(r"^\s*(\d+\.\d+)s (?:call|setup|teardown)\s+(\S.*?)\s*$", re.MULTILINE)
_FAILING = re.compile(
    r"^(?:(?:FAIL|ERROR): (test\w*)|(?:FAILED|ERROR) [^\s\[]+::(\w+))", re.MULTILINE
)
"""Names of failing tests in a log of unittest or pytest."""

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
class GradingReport:
    """Output of the test command."""

    log: str
    exit_code: int
    left: str = ""
    """The file at `report_path`; empty if there is none."""
    statuses: Mapping[str, TestStatus] = field(default_factory=dict)
    canary: Canary = Canary.NONE


Judge: TypeAlias = Callable[[GradingSpec, GradingReport], Judgement]


@dataclass(frozen=True, slots=True)
class FlowGrader:
    """A Grader that differs from others only in how it reads and judges. Implements Grader."""

    judge: Judge
    default_parser: str = ""
    """Log parser of a Task that names none; empty requires a name."""
    parser: Parser | None = None
    """The parser of every Task, whatever it names."""
    reads_report: bool = False
    """True if the parser reads the report file instead of the log."""

    async def grade(
        self, task: Task, patch: str, sandbox: Sandbox, fresh: Fresh | None = None
    ) -> Grade:
        """Grade a patch in a clean sandbox; every failure on the way becomes a Verdict.

        `fresh` opens another clean sandbox for a second run.
        """
        started = time.monotonic()
        restored: tuple[str, ...] = ()
        try:
            parse = self.parser or find_parser(task.grading.log_parser or self.default_parser)
            prepared = await prepare(task, patch, sandbox)
            restored = prepared.restored
            grading = _Grading(task, patch, sandbox, self, parse)
            result = prepared.failure or await grading.run(fresh)
        except UnknownNameError as error:
            result = Grade(Verdict.INVALID, reason=str(error))
        except SandboxError as error:
            verdict = Verdict.UNSOLVED if error.from_inside else Verdict.INFRA
            result = Grade(verdict, reason=f"the sandbox failed: {error}")
        seconds = time.monotonic() - started
        return replace(result, restored=restored, log=_capped(result.log), duration_s=seconds)


@dataclass(frozen=True, slots=True)
class _Grading:
    task: Task
    patch: str
    sandbox: Sandbox
    rules: FlowGrader
    parse: Parser

    async def run(self, fresh: Fresh | None) -> Grade:
        """Run the tests, and a second time if no canary fits in the first run."""
        spec = self.task.grading
        if not _canary.fits(spec):
            return await self._test(())
        # The canaries hide among declared tests, so one run is enough.
        if spec.fail_to_pass or spec.pass_to_pass or spec.expected:
            return await self._test(await plant(self.task, self.sandbox))
        first = await self._test(())
        if first.verdict is not Verdict.SOLVED or not can_plant(self.task):
            return first
        again = replace(self, sandbox=await fresh()) if fresh else self
        return await again._confirm(first, is_fresh=bool(fresh))

    async def _confirm(self, first: Grade, *, is_fresh: bool) -> Grade:
        """Run the tests again with canaries, which must not be solved."""
        if is_fresh:
            if failure := (await prepare(self.task, self.patch, self.sandbox)).failure:
                return failure
        else:
            # The first run may have changed the hidden files.
            await bring_files(self.task, self.sandbox)
        names = await plant(self.task, self.sandbox, in_place=True)
        if not names:
            return first
        return _compared(self.task.grading, first, await self._test(()), names)

    async def _test(self, canaries: tuple[str, ...]) -> Grade:
        spec = self.task.grading
        start, end = secrets.token_hex(16), secrets.token_hex(16)
        done = await self.sandbox.run(
            ["bash", "-s", "--", spec.test_command],
            cwd=self.task.workdir,
            env=_environment(spec),
            timeout_s=spec.timeout_s,
            stdin=_RUN.format(start=start, end=end).encode(),
        )
        # The first start marker and the last end marker: tests may print anything between.
        _, began, rest = done.text.partition(f"{start}\n")
        log, ended, tail = rest.rpartition(f"\n{end} ")
        facts = Grade(Verdict.UNSOLVED, log=rest if began else done.text, test_s=done.duration_s)
        if done.timed_out:
            reason = f"the tests ran past {spec.timeout_s:g} s"
            return replace(facts, verdict=Verdict.TIMEOUT, reason=reason)
        # Without the start marker, the tests cannot be the cause.
        if not began:
            reason = f"the test command did not start (exit code {done.exit_code})"
            return replace(facts, verdict=Verdict.INFRA, reason=reason)
        if not ended or tail.strip() != str(done.exit_code):
            event = "the output was cut" if done.truncated else "the test command was killed"
            return replace(facts, reason=f"{event} before its end marker")
        try:
            left = await self._left(log)
        except SandboxLostError:
            raise
        except SandboxError as error:
            # A retryable error is a fault of the infrastructure, not of the patch.
            if error.retryable:
                raise
            return replace(facts, log=log, reason=f"the tests left no readable report: {error}")
        report = GradingReport(log, done.exit_code, left)
        return self._judged(replace(facts, log=log), report, canaries)

    async def _left(self, log: str) -> str:
        """Return the report of the tests, or the one that `report_command` makes of their log."""
        spec = self.task.grading
        if not spec.report_path:
            return ""
        if spec.report_command:
            # The tests may have changed the files of the report command.
            await bring_files(self.task, self.sandbox)
            await self.sandbox.run(
                ["bash", "-c", spec.report_command],
                cwd=self.task.workdir,
                timeout_s=_REPORT_S,
                stdin=log.encode("utf-8", "surrogateescape"),
            )
        try:
            return (await self.sandbox.read(spec.report_path)).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _judged(self, facts: Grade, report: GradingReport, canaries: tuple[str, ...]) -> Grade:
        spec = self.task.grading
        found = self.parse(report.left if self.rules.reads_report else report.log)
        statuses, canary = _canary.separate(found, canaries)
        report = replace(report, statuses=statuses, canary=canary)
        judged = _believed(spec, self.rules.judge(spec, report), canary)
        return replace(
            facts,
            verdict=judged.verdict,
            reason=judged.reason,
            tests=judged.tests,
            canary=canary,
            durations=_durations(report.log),
        )


def _believed(spec: GradingSpec, judged: Judgement, canary: Canary) -> Judgement:
    """Return the Judgement, unless the canaries show a forged report.

    If declared tests fail, the test that a canary copies may fail too, and its opposite may pass.
    """
    is_solved = judged.verdict is Verdict.SOLVED
    fails = not is_solved and any(not status.is_good for status in judged.tests.values())
    if canary is Canary.PASSED and not fails:
        reason = "a test that was made to fail is reported as passed: the report is forged"
        return replace(judged, verdict=Verdict.CHEAT, reason=reason)
    if canary is Canary.MISSING and is_solved:
        verdict = Verdict.CHEAT if spec.canary else Verdict.UNSOLVED
        reason = "a test that was made to fail is not in the report, so nothing in it counts"
        return replace(judged, verdict=verdict, reason=reason)
    return judged


def _compared(spec: GradingSpec, first: Grade, second: Grade, names: tuple[str, ...]) -> Grade:
    """Return the first Grade, unless the run with canaries among the tests was as good.

    An honest runner names the tests that fail, so a run that fails without naming them proves
    nothing. If further tests fail, the first run was lucky or forged.
    """
    seconds = first.test_s + second.test_s
    # A second run that did not end proves nothing, so its own verdict counts.
    if second.verdict in (Verdict.INFRA, Verdict.TIMEOUT):
        return replace(second, test_s=seconds)
    first = replace(first, test_s=seconds)
    forged = Verdict.CHEAT if spec.canary else Verdict.UNSOLVED
    if second.verdict is Verdict.SOLVED:
        reason = "the tests are as good with one that was made to fail, so they do not count"
        return replace(first, verdict=forged, reason=reason, canary=Canary.PASSED)
    failing = {match[1] or match[2] for match in _FAILING.finditer(second.log)}
    if others := sorted(failing - set(names)):
        reason = f"in a second run of the tests {others[0]} fails"
        return replace(first, verdict=Verdict.UNSOLVED, reason=reason, canary=Canary.FAILED)
    if all(name in second.log for name in names):
        return replace(first, canary=Canary.FAILED)
    if spec.canary:
        reason = "a test that was made to fail is not in the log, so the tests do not count"
        return replace(first, verdict=forged, reason=reason, canary=Canary.MISSING)
    return first


def _environment(spec: GradingSpec) -> Mapping[str, str]:
    """Return the environment of the tests, in which pytest prints each duration."""
    options = f"{spec.env.get('PYTEST_ADDOPTS', '')} {_PYTEST_OPTIONS}".strip()
    return {**spec.env, "PYTEST_ADDOPTS": options}


def _durations(log: str) -> dict[str, float]:
    """Return seconds by test, set-up and teardown included, from pytest's table."""
    found: dict[str, float] = {}
    for seconds, test in _DURATION.findall(log):
        found[test] = round(found.get(test, 0.0) + float(seconds), 3)
    return found


def _capped(log: str) -> str:
    if len(log) <= _LOG_CHARS:
        return log
    half = _LOG_CHARS // 2
    return f"{log[:half]}\n[{len(log) - 2 * half} characters left out]\n{log[-half:]}"
