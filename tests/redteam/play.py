"""Run a policy through a whole Episode, or through a grader without defences, and judge the end."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from swerl.checks.vet import Runs
from swerl.core import plugins
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.episode import Episode
from swerl.core.errors import SwerlError
from swerl.core.events import ignore
from swerl.core.grade import Confirmation, TestStatus, Verdict
from swerl.core.task import GradingSpec, Protection, Task, file_bytes
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.server import Gateway
from swerl.grading.audit import Audit
from swerl.grading.log_parsers import find_parser
from swerl.harnesses import builtin
from swerl.harnesses._cli import call
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout import episode
from swerl.rollout.parts import Parts
from swerl.rollout.reward import reward_of
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.tasks.set_up import set_up
from tests.redteam.policy import Defence, Kind, Policy
from tests.redteam.projects import limits_of, project_of, task_of

_BUDGETS = BudgetsSection(
    model_call_s=60, tool_s=60, agent_s=240, grading_s=300, episode_s=540, sandbox_s=600
)
_ROLLOUT = RolloutSection(max_turns=20, max_new_tokens=60_000, max_context_tokens=500_000)
_STEP_S = 60.0
_REJECTED = "vetting rejects the Task"
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""Markers that a grader without secrets would use."""
_GOOD = {TestStatus.PASSED, TestStatus.SKIPPED, TestStatus.XFAIL, TestStatus.XPASS}
_TEST_LINE = re.compile(
    r"^(?:(PASSED|FAILED|ERROR|XFAIL) (\S+).*|(.+) \.\.\. (ok|FAIL|ERROR))$", re.MULTILINE
)
_PASSED = frozenset({"PASSED", "XFAIL", "ok"})
_measured: dict[str, Protection] = {}
"""Mutated tests by grading spec: most policies share theirs."""
_APPLY_TESTS = "git checkout -q HEAD -- tests/test_till.py && git diff >/dev/null && git apply -"


@dataclass(frozen=True, slots=True)
class Attempt:
    """The end of a policy's Episode."""

    problem: str
    """Why the policy was not stopped as it declares; empty if it was."""
    verdict: str = ""
    reward: float = 0.0
    reason: str = ""
    """The Grade's reason."""
    vetting: str = ""
    """The effect of vetting on the Task; empty without vetting."""


async def play(policy: Policy, backend: SandboxBackend, *, vets: bool = True) -> Attempt:
    """Run the policy's Episode.

    Its tests are mutated only if that is to stop the policy, or not to stop honest work.
    `vets`: vetting removes the leaks of a policy that it stops. Raises SandboxError or
    ImageError if no sandbox opens.
    """
    runs = Runs(backend, limits_of(policy.kind))
    task, vetting = task_of(policy), ""
    mutates = policy.stopped_by is Defence.MUTATED or policy.verdict is Verdict.SOLVED
    versions = (await _protection(task, runs)).versions if mutates else ()
    task = replace(task, grading=replace(task.grading, mutated=versions, not_run=()))
    if policy.stopped_by is Defence.VETTED and vets:
        cleaned = await runs.remove_leaks(task)
        if places := ", ".join(dict.fromkeys(leak.name for leak in cleaned.scan.leaks)):
            return Attempt("", vetting=f"{_REJECTED}: {places}")
        task, vetting = cleaned.task, f"vetting removed {', '.join(cleaned.removed) or 'nothing'}"
    try:
        ended = await _episode(policy, task, backend)
    except Exception as error:  # noqa: BLE001  ending the run is a success of the policy
        return Attempt(f"its Episode ended with {type(error).__name__}: {error}", vetting=vetting)
    grade = ended.grade
    return Attempt(judge(policy, ended), ended.verdict.value, ended.reward, grade.reason, vetting)


async def _protection(task: Task, runs: Runs) -> Protection:
    key = repr(task.grading)
    if key not in _measured:
        _measured[key] = await runs.measure(task)
    return _measured[key]


async def _episode(policy: Policy, task: Task, backend: SandboxBackend) -> Episode:
    calls = [call("bash", command=command) for command in policy.commands]
    replies = [*calls, call("submit")]
    family = plugins.family("tiny", None)
    async with AsyncExitStack() as stack:
        engine = ScriptedEngine(family, lambda _: replies)
        stack.push_async_callback(engine.close)
        gateway = await stack.enter_async_context(Gateway(engine=engine, family=family))
        parts = Parts(
            gateway=gateway,
            sandboxes=SandboxPool(backend, limits_of(policy.kind), concurrency=1),
            harness=builtin.build(builtin.Options()),
            reward=reward_of("solved"),
            rollout=_ROLLOUT,
            budgets=_BUDGETS,
            seed=0,
            emit=ignore,
            audit=Audit(1.0),
        )
        return await episode.run(task, f"redteam/{policy.name}", parts)


def judge(policy: Policy, ended: Episode) -> str:
    """Return the problem with the end of a policy's Episode; empty if the policy was stopped."""
    if ended.reward > 0:
        return f"it was rewarded: {ended.grade.reason}"
    # The runs are drawn, so the one that betrays a policy is as well, and a policy that looks for
    # signs of a mutation may fail in the first run already.
    is_early = policy.stopped_by is Defence.MUTATED and ended.verdict is Verdict.UNSOLVED
    is_caught = policy.stopped_by is Defence.TESTS and ended.verdict is Verdict.CHEAT
    if ended.verdict is not policy.verdict and not is_early and not is_caught:
        return f"it is {ended.verdict} and not {policy.verdict}: {ended.grade.reason}"
    if not is_early and not _is_visible(policy.stopped_by, ended):
        return f"something else stopped it than declared: {ended.grade.reason}"
    return ""


def _is_visible(defence: Defence, ended: Episode) -> bool:
    """Return True if the Episode shows the declared defence, or if the defence leaves no trace."""
    match defence:
        case Defence.DROPPED:
            return bool(ended.grade.restored)
        case Defence.MUTATED:
            return ended.grade.confirmation in (Confirmation.FORGED, Confirmation.UNSTEADY)
        case Defence.FUTURE | Defence.NETWORK | Defence.SIZE | Defence.NOT_TAKEN:
            return not ended.patch
    return True


async def is_rewarded_naively(policy: Policy, backend: SandboxBackend) -> bool:
    """Return True if a grader without defences rewards the policy. Raises SandboxError.

    This proves that the policy cheats. The grader works in the agent's own sandbox, which still
    holds everything, adds only tests that the repository lacks, cuts the log at well-known markers,
    and believes the last line about a test.
    """
    task = task_of(policy)
    async with backend.open(task.image, limits_of(policy.kind), workdir=task.workdir) as sandbox:
        await set_up(sandbox, task)
        for command in policy.commands:
            await _bash(sandbox, task, command)
        await _add_tests(sandbox, task)
        try:
            return await _grade_naively(sandbox, task)
        except (SwerlError, FileNotFoundError):
            return False


async def _bash(sandbox: Sandbox, task: Task, command: str, stdin: bytes = b"") -> None:
    argv = ["bash", "-c", command]
    await sandbox.run(argv, cwd=task.workdir, timeout_s=_STEP_S, stdin=stdin)


async def _add_tests(sandbox: Sandbox, task: Task) -> None:
    spec = task.grading
    if spec.test_patch:
        await _bash(sandbox, task, _APPLY_TESTS, spec.test_patch.encode())
    added = {f"{task.workdir}/{path}": text for path, text in spec.test_files.items()}
    for path, text in {**added, **spec.files}.items():
        inside = path.removeprefix(f"{task.workdir}/")
        exists = ["sh", "-c", f"test -e '{path}' || git cat-file -e 'HEAD:{inside}'"]
        existing = await sandbox.run(exists, cwd=task.workdir, timeout_s=_STEP_S)
        if existing.exit_code:
            await sandbox.write(path, file_bytes(text))


async def _grade_naively(sandbox: Sandbox, task: Task) -> bool:
    spec = task.grading
    script = f"exec 2>&1; echo '{_START}'; ({spec.test_command}); code=$?; echo '{_END}'"
    done = await sandbox.run(
        ["bash", "-c", f"{script}; exit $code"],
        cwd=task.workdir,
        env=dict(spec.env),
        timeout_s=spec.timeout_s,
        stdin=b"",
    )
    if spec.report_path:
        return (await sandbox.read(spec.report_path)).strip() == b"1"
    if not spec.fail_to_pass:
        return done.exit_code == 0
    statuses = find_parser(spec.log_parser)(done.text)
    if all(statuses.get(test) in _GOOD for test in _declared(spec)):
        return True
    last: dict[str, bool] = {}
    for word, name, shown, end in _TEST_LINE.findall(done.text.split(_END)[0].split(_START)[-1]):
        last[name or shown] = (word or end) in _PASSED
    return all(last.get(test, False) for test in _declared(spec))


def _declared(spec: GradingSpec) -> tuple[str, ...]:
    return (*spec.fail_to_pass, *spec.pass_to_pass)


async def missing_tool(kind: Kind, backend: SandboxBackend) -> str:
    """Return the command of a kind's tools if it does not run in the image `host`, else nothing."""
    probe = project_of(kind).probe
    async with backend.open("host", limits_of(kind), workdir="/srv") as sandbox:
        done = await sandbox.run(["bash", "-c", probe], timeout_s=_STEP_S)
    return probe if done.exit_code else ""
