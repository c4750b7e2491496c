"""Discover the tests of a Task: those that its solution fixes, and those that it keeps.

The tests run before and after the known solution, several times each, in clean sandboxes. A test
whose results differ between equal runs is flaky and left out. The log parser is the one of the
runner, or the one that finds the most tests that pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from swerl.checks.vet import Runs
from swerl.core.certificate import row_digest
from swerl.core.changes import touched
from swerl.core.grade import TestStatus, Verdict
from swerl.core.jobs import append_result, read_results
from swerl.core.task import GradingSpec, Task
from swerl.grading.flow import LOG_CHARS
from swerl.grading.log_parsers import PARSERS, LogError, find_parser, read_log

_UNKNOWN = "swerl: unknown test"
"""A declared test that no log has, so that no run counts as solved and is confirmed."""
_RUNNERS = {
    r"=+ .*\bin \d+\.\d+s": "pytest",
    r"Ran \d+ tests? in": "django",
    r" +\d+ passing \(": "mocha jest",
    r"Tests: .*, \d+ total": "jest",
    r" +Tests  \d": "vitest",
    r"\S tests \d": "tap mocha",
    r"(ok|FAIL)\s+\S+\s+[\d.]+s": "go_test",
    r"test result: ": "cargo_modes",
    r"BUILD (SUCCESSFUL|FAILED) in|(\[\w+\] )?Tests run: \d+, F": "gradle junit",
    r"\d+ examples?, \d+ failures?": "rspec junit",
    r"(OK \(|Tests: )\d+.*, .*ssertions": "phpunit junit",
    r"\d+% tests passed": "ctest",
}
"""Start of a line that only one runner writes -> the parsers of its logs. Parsers read other lines,
too: unittest's takes any text before ` ... ok`."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """The tests of a Task, or why it has none."""

    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    log_parser: str = ""
    problem: str = ""


class Discoveries:
    """Discovers the tests of Tasks, and keeps each result in a journal to resume from."""

    def __init__(self, runs: Runs, journal: Path) -> None:
        """Read the journal, if there is one. Raises InputError on a file of something else."""
        self._runs, self._journal = runs, journal
        hint = f"move {journal} away"
        from_row = TypeAdapter(Discovery).validate_python
        rows = read_results(
            journal, lambda row: (row["key"], from_row(row)), kind="discovery", hint=hint
        )
        self._results: dict[str, Discovery] = dict(rows)

    async def of(self, task: Task) -> Discovery:
        """Return the tests of a Task. Raises SandboxError."""
        key = row_digest(task)
        if key not in self._results:
            self._results[key] = tests = await discover(task, self._runs)
            append_result(self._journal, {"key": key, "task": task.id, **asdict(tests)})
        return self._results[key]


async def discover(task: Task, runs: Runs, *, num_runs: int = 3) -> Discovery:
    """Run the tests before and after the solution. Raises SandboxError."""
    parser = task.grading.log_parser
    spec = replace(task.grading, fail_to_pass=(_UNKNOWN,), log_parser="pytest")
    before: list[Mapping[str, TestStatus]] = []
    after: list[Mapping[str, TestStatus]] = []
    for _ in range(num_runs):
        # The solution first: its log shows the parser, and most commits fail here.
        for patch, results in ((task.gold_patch, after), ("", before)):
            grade = (await runs.grade(replace(task, grading=spec), patch)).grade
            if grade.verdict is not Verdict.UNSOLVED or not grade.log:
                return Discovery(problem=grade.reason)
            if len(grade.log) > LOG_CHARS:
                return Discovery(problem="its log is too long to keep: print less of each test")
            parser = parser or await _best_parser(grade.log)
            if not parser:
                last = grade.log.strip().rpartition("\n")[2][:200]
                return Discovery(problem=f"no test passes with the solution; its log ends: {last}")
            results.append(await _statuses(parser, grade.log))
        # More runs cannot make up for a solution that fixes nothing.
        tests = _tests(task, before, after)
        if not tests.fail_to_pass:
            return replace(tests, problem="the solution makes no test pass that failed before")
    return replace(tests, log_parser=parser)


def declared(spec: GradingSpec, tests: Discovery) -> GradingSpec:
    """Return a spec with the discovered tests."""
    return replace(
        spec,
        fail_to_pass=tests.fail_to_pass,
        pass_to_pass=tests.pass_to_pass,
        log_parser=tests.log_parser,
    )


async def _best_parser(log: str) -> str:
    """Return the runner's parser that finds the most passing tests; empty if none finds one."""
    runners = [names for start, names in _RUNNERS.items() if re.search(f"^({start})", log, re.M)]
    counts = {}
    for name in " ".join(runners).split() or ("pytest", *PARSERS):
        statuses = await _statuses(name, log)
        counts[name] = sum(status.passes for status in statuses.values())
    return max(filter(counts.get, counts), key=counts.__getitem__, default="")


async def _statuses(parser: str, log: str) -> Mapping[str, TestStatus]:
    try:
        return await read_log(find_parser(parser), log)
    except LogError:
        return {}


def _tests(
    task: Task,
    before: Sequence[Mapping[str, TestStatus]],
    after: Sequence[Mapping[str, TestStatus]],
) -> Discovery:
    """Sort the tests by their results. A test that did not run before counts as failing.

    If it is in a file that the tests' patch leaves as it is, only an error of another file has
    stopped it, and it is a test to keep.
    """
    files = touched(task.grading.test_patch)
    fixed, kept, flaky = [], [], []
    for test in dict.fromkeys(test for run in (*before, *after) for test in run):
        old, new = ({run.get(test, TestStatus.MISSING) for run in runs} for runs in (before, after))
        path = test.partition("::")[0]
        # Ids of Rust have colons, too, behind a module.
        is_elsewhere = "::" in test and "." in path and path not in files
        if len(old) > 1 or len(new) > 1:
            flaky.append(test)
        elif not new.pop().passes:
            continue
        elif (status := old.pop()).passes or (status is TestStatus.MISSING and is_elsewhere):
            kept.append(test)
        else:
            fixed.append(test)
    return Discovery(tuple(fixed), tuple(kept), tuple(flaky))
