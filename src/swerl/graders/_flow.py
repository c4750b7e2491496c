"""The steps that every grader shares: apply the patch, bring the hidden tests, run, read, judge.

Two commands run in the sandbox. The first applies what is accepted of the patch, takes the test
files back to the base, and applies the test patch. The second runs the tests between two markers
that carry a fresh random word; the word reaches the shell over stdin, so no argument list or
environment inside the sandbox shows it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from swerl.errors import SandboxError
from swerl.grade import Grade, Verdict
from swerl.graders._files import accept, paths
from swerl.graders._verdict import Judgement
from swerl.interfaces import Sandbox
from swerl.sandbox import Exec
from swerl.task import Task

_PREPARE_S = 120.0
"""Most seconds for applying patches: ten times what the largest known one takes."""
_LOG_CHARS = 200_000
"""Characters of the test log that a Grade keeps, half from each end."""

_PREPARE = r"""
base=$1 tests=$2; shift 2
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
run_git() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
by_patch() { patch --batch --forward --fuzz=5 -p1 "$@" -i "$diff"; }
diff=$(mktemp) && cat >"$diff" || exit 90
if [ -s "$diff" ]; then
  run_git apply --whitespace=nowarn "$diff" ||
  run_git apply --whitespace=nowarn --ignore-whitespace "$diff" ||
  { by_patch --dry-run && by_patch --no-backup-if-mismatch; } || exit 91
fi
rm -f "$diff"
if run_git rev-parse -q --verify HEAD >/dev/null 2>&1; then
  run_git rev-parse -q --verify "${base:=HEAD}^{commit}" >/dev/null 2>&1 || base=HEAD
  for path do
    if run_git cat-file -e "$base:$path" 2>/dev/null
    then run_git checkout -q "$base" -- "$path" || exit 92
    else rm -rf -- "$path"
    fi
  done
fi
[ -z "$tests" ] || run_git apply --whitespace=nowarn "$tests" || exit 92
[ -z "$tests" ] || rm -f "$tests"
"""
_PATCH_REFUSED = 91
_TESTS_REFUSED = 92

_RUN = """{{
exec </dev/null 2>&1
printf '\\n%s\\n' '{start}'
bash -c "$1"
printf '\\n%s %s\\n' '{end}' "$?"
exit
}}
"""


@dataclass(frozen=True, slots=True)
class TestRun:
    """What the test command left."""

    __test__ = False

    log: str
    """What it printed, between the markers."""
    exit_code: int


Judge = Callable[[Task, TestRun], Judgement]


async def grade(task: Task, patch: str, sandbox: Sandbox, judge: Judge) -> Grade:
    """Grade a patch in a clean sandbox; what breaks on the way becomes a Verdict of its own."""
    started = time.monotonic()
    accepted = accept(task, patch)
    try:
        result = await _prepare(task, accepted.patch, sandbox)
        result = result or await _run_tests(task, sandbox, judge)
    except SandboxError as error:
        result = Grade(Verdict.INFRA, reason=f"the sandbox failed: {error}")
    return replace(result, restored=accepted.dropped, duration_s=time.monotonic() - started)


async def _prepare(task: Task, patch: str, sandbox: Sandbox) -> Grade | None:
    """Bring the work tree to where the tests can run; a Grade says why that failed."""
    spec = task.grading
    if patch or spec.test_patch:
        tests = ""
        if spec.test_patch:
            tests = f"/tmp/swerl-{secrets.token_hex(8)}.diff"
            await sandbox.write(tests, _with_newline(spec.test_patch))
        script = ["bash", "-c", _PREPARE, "prepare", task.base_commit, tests]
        end = await sandbox.run(
            [*script, *paths(spec.test_patch)],
            cwd=task.workdir,
            timeout_s=_PREPARE_S,
            stdin=patch.encode("utf-8", "surrogateescape"),
        )
        if end.exit_code:
            return _prepare_failure(end, has_patch=bool(patch))
    for path, text in spec.test_files.items():
        await sandbox.write(f"{task.workdir}/{path}", text.encode())
    return None


def _prepare_failure(end: Exec, *, has_patch: bool) -> Grade:
    log = _capped(end.text)
    if end.exit_code == _PATCH_REFUSED:
        return Grade(Verdict.UNSOLVED, reason="patch does not apply", log=log)
    if end.exit_code == _TESTS_REFUSED and has_patch:
        reason = "the test patch does not apply on top of the patch"
        return Grade(Verdict.UNSOLVED, reason=reason, log=log)
    if end.exit_code == _TESTS_REFUSED:
        reason = "the test patch does not apply to the base"
        return Grade(Verdict.INVALID, reason=reason, log=log)
    reason = f"the work tree could not be prepared (exit code {end.exit_code})"
    return Grade(Verdict.INFRA, reason=reason, log=log)


async def _run_tests(task: Task, sandbox: Sandbox, judge: Judge) -> Grade:
    nonce = secrets.token_hex(16)
    start, end = f">>>>> tests begin {nonce}", f">>>>> tests end {nonce}"
    done = await sandbox.run(
        ["bash", "-s", "--", task.grading.test_command],
        cwd=task.workdir,
        env=task.grading.env,
        timeout_s=task.grading.timeout_s,
        stdin=_RUN.format(start=start, end=end).encode(),
    )
    text = done.text
    _, began, rest = text.partition(start + "\n")
    log, ended, tail = rest.rpartition(f"\n{end} ")
    if done.timed_out:
        reason = f"the tests ran past {task.grading.timeout_s:g} s"
        return Grade(Verdict.TIMEOUT, reason=reason, log=_capped(rest), test_s=done.duration_s)
    if not began:
        reason = f"the test command did not start (exit code {done.exit_code})"
        return Grade(Verdict.INFRA, reason=reason, log=_capped(text))
    if not ended:
        reason = "the output was cut" if done.truncated else "the test command was killed"
        reason += " before its end marker"
        return Grade(Verdict.UNSOLVED, reason=reason, log=_capped(rest), test_s=done.duration_s)
    said = judge(task, TestRun(log, int(tail.split()[0])))
    return Grade(
        said.verdict,
        reason=said.reason,
        tests=said.tests,
        test_s=done.duration_s,
        log=_capped(log),
    )


def _with_newline(patch: str) -> bytes:
    text = patch if patch.endswith("\n") else patch + "\n"
    return text.encode("utf-8", "surrogateescape")


def _capped(log: str) -> str:
    if len(log) <= _LOG_CHARS:
        return log
    half = _LOG_CHARS // 2
    return f"{log[:half]}\n[{len(log) - 2 * half} characters left out]\n{log[-half:]}"
