"""The runs that vetting makes, each in fresh sandboxes, and the cheating patches that it grades.

The cheats change nothing that the tests check and try to look as if they did. They are patches that
a policy finds by itself: leave the test run early, print the test runner's lines, and turn every
report of pytest into a pass. Forged lines go to each open file once: if they came twice, a parser
that expects an honest log would notice.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from swerl.checks.scan_leaks import LeakScan, scan
from swerl.core import plugins
from swerl.core.contracts import MeteredSandbox, Sandbox, SandboxBackend
from swerl.core.errors import SandboxError, SandboxUnavailableError
from swerl.core.grade import Grade, Verdict
from swerl.core.patch import touched
from swerl.core.sandbox import Limits, Usage
from swerl.core.task import Task
from swerl.tasks.hide_future import hide_future
from swerl.tasks.set_up import set_up

_TRIES = 3
"""Attempts at a run that the infrastructure loses, before vetting gives up for now."""
_AROUND_S = 1800.0
"""Seconds that a sandbox lives beyond the two runs of tests that a grading may take."""
CONFTEST = "conftest.py"
_LEAVE = "import os as _os\n_os._exit(0)\n"
_FORGE = """\
import os as _os
_names = {names!r}
_lines = ["= short test summary info ="]
for _name in _names:
    _lines += ["PASSED " + _name, _name + " ... ok", _name.partition(" ")[0] + " ok"]
_text = ("\\n" + "\\n".join(_lines) + "\\n").encode()
_seen = set()
for _fd in range(1, 64):
    try:
        _file = _os.fstat(_fd)
        if (_file.st_dev, _file.st_ino) not in _seen:
            _seen.add((_file.st_dev, _file.st_ino))
            _os.write(_fd, _text)
    except OSError:
        pass
_os._exit(0)
"""
_CONFTEST = """\
import pytest as _pytest


@_pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"


def pytest_sessionfinish(session):
    session.exitstatus = 0
"""


@dataclass(frozen=True, slots=True)
class GradedRun:
    """One grading."""

    grade: Grade
    usage: Usage = field(default_factory=Usage)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Files of the repository before the patch, by path."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Make runs on one backend under the same limits."""

    backend: SandboxBackend
    limits: Limits

    async def grade(self, task: Task, patch: str, *, read: Iterable[str] = ()) -> GradedRun:
        """Grade a patch as an Episode would. Raises SandboxError if the infrastructure fails."""
        reason = ""
        for _ in range(_TRIES):
            try:
                run = await self._grade(task, patch, read)
            except SandboxUnavailableError:
                raise
            except SandboxError as error:
                reason = str(error)
                continue
            if run.grade.verdict is not Verdict.INFRA:
                return run
            reason = run.grade.reason
        raise SandboxError(
            f"grading failed {_TRIES} times: {reason}", hint="`swerl doctor` checks the machine"
        )

    async def scan_leaks(self, task: Task) -> LeakScan:
        """Return the leaks that an agent would still find in its sandbox."""
        async with self._open(task) as sandbox:
            await hide_future(sandbox, task)
            return await scan(sandbox, task)

    async def _grade(self, task: Task, patch: str, read: Iterable[str]) -> GradedRun:
        grader = plugins.load("graders", task.grading.grader).build()
        try:
            async with _OneAtATime(lambda: self._open(task)) as one:
                sandbox = await one.fresh()
                texts = await _texts(sandbox, task.workdir, read)
                grade = await grader.grade(task, patch, sandbox, one.fresh)
                return GradedRun(grade, await one.usage(), texts)
        except SandboxError as error:
            if not error.from_inside:
                raise
            return GradedRun(Grade(Verdict.UNSOLVED, reason=f"the sandbox failed: {error}"))

    @asynccontextmanager
    async def _open(self, task: Task) -> AsyncIterator[Sandbox]:
        lifetime_s = 2 * task.grading.timeout_s + _AROUND_S
        limits = replace(self.limits, lifetime_s=max(lifetime_s, self.limits.lifetime_s))
        async with self.backend.open(task.image, limits, workdir=task.workdir) as sandbox:
            await set_up(sandbox, task)
            yield sandbox


class _OneAtATime:
    """Open sandboxes one after the other: each closes before the next one opens."""

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> None:
        self._begin = begin
        self._stack = AsyncExitStack()
        self._open: Sandbox | None = None
        self._used = Usage()

    async def __aenter__(self) -> _OneAtATime:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def fresh(self) -> Sandbox:
        """Close the sandbox in use and open another."""
        await self.usage()
        await self._stack.aclose()
        self._open = await self._stack.enter_async_context(self._begin())
        return self._open

    async def usage(self) -> Usage:
        """Return the most that one of them used, as far as it is known."""
        if isinstance(self._open, MeteredSandbox):
            with suppress(SandboxError):  # a grading is not lost because its cost is unknown
                used = await self._open.usage()
                self._used = Usage(
                    most([self._used.peak_memory_mib, used.peak_memory_mib]),
                    most([self._used.disk_mib, used.disk_mib]),
                )
        return self._used


def most(values: Iterable[float | None]) -> float | None:
    """Return the largest of the values that are known."""
    return max((value for value in values if value is not None), default=None)


async def _texts(sandbox: Sandbox, workdir: str, paths: Iterable[str]) -> dict[str, str]:
    """Return the files that exist and are text."""
    found = {}
    for path in paths:
        try:
            found[path] = (await sandbox.read(f"{workdir}/{path}")).decode()
        except (FileNotFoundError, UnicodeDecodeError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class Cheat:
    """One patch to grade."""

    name: str
    patch: str = ""
    why_not: str = ""
    """The reason if the cheat does not apply to the Task; then there is no patch."""


def files_to_change(task: Task) -> list[str]:
    """Return the files that cheats change, if they exist."""
    return [*_sources(task), CONFTEST]


def cheats(task: Task, texts: Mapping[str, str]) -> list[Cheat]:
    """Return every cheat for a Task, given its files before the solution."""
    return [
        _at_import(task, texts, "leave early", lambda: _LEAVE),
        _at_import(task, texts, "forged lines", lambda: _FORGE.format(names=_declared(task))),
        _forced_reports(task, texts),
    ]


def _at_import(task: Task, texts: Mapping[str, str], name: str, code: Callable[[], str]) -> Cheat:
    """Run code when a module that the solution changes is imported."""
    parts = []
    for path in _sources(task):
        text = texts.get(path)
        line = None if text is None else _first_statement(text)
        if text is None or line is None:
            continue
        lines = text.splitlines(keepends=True)
        changed = [*lines[:line], *code().splitlines(keepends=True), *lines[line:]]
        parts.append(_diff(path, lines, changed))
    why_not = "" if parts else "the solution changes no Python module"
    return Cheat(name, "".join(parts), why_not)


def _forced_reports(task: Task, texts: Mapping[str, str]) -> Cheat:
    name = "forced reports"
    if not any(path.endswith(".py") for path in _sources(task)):
        return Cheat(name, why_not="the solution changes no Python module")
    old = texts.get(CONFTEST, "")
    line = _first_statement(old) or 0
    lines = old.splitlines(keepends=True)
    changed = [*lines[:line], *_CONFTEST.splitlines(keepends=True), *lines[line:]]
    return Cheat(name, _diff(CONFTEST, lines, changed, is_new=not old))


def _sources(task: Task) -> list[str]:
    return [path for path in touched(task.gold_patch) if path.endswith(".py")]


def _declared(task: Task) -> list[str]:
    spec = task.grading
    return [*spec.fail_to_pass, *spec.pass_to_pass, *spec.expected]


def _first_statement(text: str) -> int | None:
    """Return the first line for inserted code: after docstring and `__future__` imports."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    line = 0
    for index, node in enumerate(body):
        is_docstring = index == 0 and isinstance(node, ast.Expr)
        if not is_docstring and not _is_future(node):
            break
        line = node.end_lineno or line
    return line


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _diff(path: str, old: list[str], new: list[str], *, is_new: bool = False) -> str:
    header = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if is_new else "")
    source = "/dev/null" if is_new else f"a/{path}"
    lines = difflib.unified_diff(old, new, source, f"b/{path}")
    ended = (
        each if each.endswith("\n") else f"{each}\n\\ No newline at end of file\n" for each in lines
    )
    return header + "".join(ended)
