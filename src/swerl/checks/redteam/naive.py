"""A grader without defences, to see that a policy would be rewarded: the sheet is not vacuous.

It grades in the agent's own sandbox, of which nothing was taken out, brings only tests that are
not in the repository, cuts the log at markers that everybody knows, and believes the last line
about a test.
"""

from __future__ import annotations

import re

from swerl.checks.redteam._code import END, START
from swerl.checks.redteam.ground import LIMITS
from swerl.checks.redteam.policy import Policy
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.task import GradingSpec, Task, file_bytes
from swerl.tasks.set_up import set_up

_TIMEOUT_S = 60.0
_LINE = re.compile(
    r"^(?:(PASSED|FAILED|ERROR|XFAIL) (\S+).*|(.+) \.\.\. (ok|FAIL|ERROR))$", re.MULTILINE
)
_PASSED = frozenset({"PASSED", "XFAIL", "ok"})
_CHECK_OUT = """
git checkout -q HEAD -- tests/test_till.py && git diff >/dev/null && git apply -
"""


async def rewards(policy: Policy, task: Task, backend: SandboxBackend) -> bool:
    """Say whether a grader without defences rewards the policy. Raises SandboxError."""
    async with backend.open(task.image, LIMITS, workdir=task.workdir) as sandbox:
        await set_up(sandbox, task)
        for command in policy.commands:
            await sandbox.run(
                ["bash", "-c", command], cwd=task.workdir, timeout_s=_TIMEOUT_S, stdin=b""
            )
        await _bring_tests(sandbox, task)
        return await _judge(sandbox, task)


async def _bring_tests(sandbox: Sandbox, task: Task) -> None:
    spec = task.grading
    if spec.test_patch:
        await sandbox.run(
            ["bash", "-c", _CHECK_OUT],
            cwd=task.workdir,
            timeout_s=_TIMEOUT_S,
            stdin=spec.test_patch.encode(),
        )
    inside = {f"{task.workdir}/{path}": text for path, text in spec.test_files.items()}
    for path, text in {**inside, **spec.files}.items():
        here = path.removeprefix(f"{task.workdir}/")
        asked = ["sh", "-c", f"test -e '{path}' || git cat-file -e 'HEAD:{here}'"]
        known = await sandbox.run(asked, cwd=task.workdir, timeout_s=_TIMEOUT_S)
        if known.exit_code:
            await sandbox.write(path, file_bytes(text))


async def _judge(sandbox: Sandbox, task: Task) -> bool:
    spec = task.grading
    script = f"exec 2>&1; echo '{START}'; ({spec.test_command}); code=$?; echo '{END}'; exit $code"
    done = await sandbox.run(
        ["bash", "-c", script],
        cwd=task.workdir,
        env=dict(spec.env),
        timeout_s=spec.timeout_s,
        stdin=b"",
    )
    if spec.report_path:
        return (await sandbox.read(spec.report_path)).strip() == b"1"
    if spec.fail_to_pass:
        return _all_pass(spec, done.text)
    return done.exit_code == 0


def _all_pass(spec: GradingSpec, text: str) -> bool:
    last: dict[str, bool] = {}
    for word, name, shown, end in _LINE.findall(text.split(END)[0].split(START)[-1]):
        last[name or shown] = (word or end) in _PASSED
    return all(last.get(test, False) for test in (*spec.fail_to_pass, *spec.pass_to_pass))
