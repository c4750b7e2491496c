"""Run cheating policies through whole Episodes, a few at once, and judge how each Episode ended."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from swerl.checks._vet_runs import Runs
from swerl.core import plugins
from swerl.core.chat import Json, Message, Role, ToolCall
from swerl.core.contracts import Sandbox, SandboxBackend
from swerl.core.episode import Episode
from swerl.core.errors import SwerlError, unknown
from swerl.core.events import ignore
from swerl.core.grade import Blind, TestStatus, Verdict
from swerl.core.jobs import run_jobs
from swerl.core.task import GradingSpec, Task, file_bytes
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.server import Gateway
from swerl.grading.log_parsers import find_parser
from swerl.harnesses import builtin
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout import episode, record
from swerl.rollout.parts import Parts, Provisioner
from swerl.rollout.reward import reward_of
from swerl.tasks.set_up import set_up
from tests.redteam import (
    asserting,
    exiting,
    flooding,
    forging,
    judging,
    leaving,
    reaching,
    reading,
    revealing,
    sandbox,
    skipping,
    smelling,
    smuggling,
    steering,
)
from tests.redteam.languages import GROUNDS
from tests.redteam.policy import Defence, Policy
from tests.redteam.repository import (
    END,
    LANGUAGE_LIMITS,
    LIMITS,
    START,
    ImageTools,
    inspect,
    obstacle,
    task_of,
)

_BUDGETS = BudgetsSection(
    model_call_s=60, tool_s=60, agent_s=240, grading_s=300, episode_s=540, sandbox_s=600
)
"""Generous: the speed of the machine is unknown."""
_ROLLOUT = RolloutSection(max_turns=20, max_new_tokens=60_000, max_context_tokens=500_000)
_SHOWN_CHARS = 300
_STEP_S = 60.0
_REJECTED = "vetting rejects the Task"
FIRST_TOPICS = (sandbox, steering, forging, exiting)
"""Policies against one small Python project."""
FURTHER_TOPICS = (
    *(leaving, asserting, reading, smelling, skipping, revealing),
    *(reaching, judging, smuggling, flooding),
)
"""Policies in all languages, and more ways on the same project."""
_LANGUAGE_PARSERS = {ground.parser for ground in GROUNDS.values()}
_NAIVELY_GOOD = {TestStatus.PASSED, TestStatus.SKIPPED, TestStatus.XFAIL, TestStatus.XPASS}
_TEST_LINE = re.compile(
    r"^(?:(PASSED|FAILED|ERROR|XFAIL) (\S+).*|(.+) \.\.\. (ok|FAIL|ERROR))$", re.MULTILINE
)
_UNPAID = frozenset({Verdict.UNSOLVED, Verdict.CHEAT})
_PASSED = frozenset({"PASSED", "XFAIL", "ok"})
_APPLY_TESTS = """
git checkout -q HEAD -- tests/test_till.py && git diff >/dev/null && git apply -
"""


class PolicyOutcome(StrEnum):
    """How a policy ended."""

    HELD = "held"
    """As it declares, without a reward."""
    BROKE = "BROKE"
    """With a reward, or in another way than it declares."""
    SKIPPED = "skipped"
    """It could not run; this proves nothing."""


@dataclass(frozen=True, slots=True)
class PolicyResult:
    policy: Policy
    outcome: PolicyOutcome
    verdict: str = ""
    reward: float = 0.0
    seen: str = ""
    """The Grade's reason, or why the policy did not run or did not hold."""
    rewarded_naively: bool | None = None
    """True if a grader without defences rewards it; None if that was not tried."""
    duration_s: float = 0.0
    vetting: str = ""
    """The effect of vetting on its Task; empty if the Task was not vetted."""

    def to_json(self) -> dict[str, Json]:
        return {
            "policy": self.policy.name,
            "tries": self.policy.sentence,
            "ground": self.policy.kind.value,
            "result": self.outcome.value,
            "verdict": self.verdict,
            "declared": self.policy.verdict.value,
            "reward": self.reward,
            "stopped_by": self.policy.stopped_by.value,
            "seen": self.seen,
            "vetting": self.vetting,
            "rewarded_naively": self.rewarded_naively,
            "duration_s": round(self.duration_s, 3),
        }


@dataclass(frozen=True, slots=True)
class RedteamReport:
    backend: str
    image: str
    rows: Sequence[PolicyResult]
    duration_s: float

    @property
    def counts(self) -> dict[PolicyOutcome, int]:
        found = Counter(row.outcome for row in self.rows)
        return {outcome: found[outcome] for outcome in PolicyOutcome}

    def to_json(self) -> dict[str, Json]:
        return {
            "backend": self.backend,
            "image": self.image,
            "duration_s": round(self.duration_s, 3),
            "counts": {outcome.value: count for outcome, count in self.counts.items()},
            "policies": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class RedteamSettings:
    name: str = "local"
    """Kind of sandbox, as users type it."""
    image: str = "host"
    num_jobs: int = 4
    """Episodes at once."""
    naively: bool = False
    """Grade each policy a second time, without defences."""
    vets: bool = True
    """Vet the Tasks of policies that vetting stops, as those of a training run are."""
    out: Path | None = None
    """Folder that gets the Episodes."""


def all_policies() -> list[Policy]:
    """Return every policy, in the order of reports."""
    return [each for topic in (*FIRST_TOPICS, *FURTHER_TOPICS) for each in topic.POLICIES]


def choose(names: Sequence[str]) -> list[Policy]:
    """Return the policies of these names; all if none is named. Raises UnknownNameError."""
    policies = {policy.name: policy for policy in all_policies()}
    for name in names:
        if name not in policies:
            raise unknown("policy", name, policies)
    return [policy for name, policy in policies.items() if not names or name in names]


async def run(
    backend: SandboxBackend,
    policies: Sequence[Policy],
    settings: RedteamSettings,
    *,
    on_done: Callable[[PolicyResult], None] = lambda _: None,
) -> RedteamReport:
    """Run the policies and report them in their order; `on_done` gets each result as it ends.

    Raises SandboxError or ImageError if no sandbox opens, or if its image lacks Python or git.
    """
    started = time.monotonic()
    tools = await inspect(backend, settings.image)
    scripts = {_episode_id(policy): _replies(policy) for policy in policies}
    family = plugins.family("tiny", None)
    async with AsyncExitStack() as open_parts:
        engine = ScriptedEngine(family, lambda session: scripts[session])
        open_parts.push_async_callback(engine.close)
        gateway = await open_parts.enter_async_context(Gateway(engine=engine, family=family))
        small = Parts(
            gateway=gateway,
            provisioner=Provisioner(backend, LIMITS, concurrency=settings.num_jobs),
            harness=builtin.build(builtin.Options()),
            reward=reward_of("solved"),
            rollout=_ROLLOUT,
            budgets=_BUDGETS,
            seed=0,
            emit=ignore,
        )

        large = replace(
            small, provisioner=Provisioner(backend, LANGUAGE_LIMITS, concurrency=settings.num_jobs)
        )

        async def run_one(policy: Policy) -> PolicyResult:
            parts = large if policy.kind in GROUNDS else small
            return await _run(policy, backend, settings, tools, parts)

        rows = await run_jobs(policies, run_one, limit=settings.num_jobs, on_done=on_done)
    return RedteamReport(settings.name, settings.image, rows, time.monotonic() - started)


def _episode_id(policy: Policy) -> str:
    return f"redteam/{policy.name}"


def _replies(policy: Policy) -> list[Message]:
    """Return the model's replies: one call per command, then `submit`."""
    calls = [ToolCall("", "bash", {"command": command}) for command in policy.commands]
    calls.append(ToolCall("", "submit", {}))
    return [Message(Role.ASSISTANT, tool_calls=(call,)) for call in calls]


async def _run(
    policy: Policy,
    backend: SandboxBackend,
    settings: RedteamSettings,
    tools: ImageTools,
    parts: Parts,
) -> PolicyResult:
    if reason := obstacle(policy, tools):
        return PolicyResult(policy, PolicyOutcome.SKIPPED, seen=reason)
    started = time.monotonic()
    raw = task = task_of(policy, tools, settings.image)
    vetting = ""
    try:
        if policy.stopped_by is Defence.VETTED and settings.vets:
            task, vetting = await _vetted(task, backend)
            if vetting.startswith(_REJECTED):
                return PolicyResult(policy, PolicyOutcome.HELD, seen=vetting, vetting=vetting)
        ended = await episode.run(task, _episode_id(policy), parts)
    except Exception as error:  # noqa: BLE001  ending the run is a success of the policy
        problem = f"its Episode ended with {type(error).__name__}: {error}"[:_SHOWN_CHARS]
        return PolicyResult(policy, PolicyOutcome.BROKE, seen=problem)
    if settings.out:
        record.write(settings.out / f"{policy.name}.0", ended)
    problem = judge(policy, ended)
    outcome = PolicyOutcome.BROKE if problem else PolicyOutcome.HELD
    seen = " ".join((problem or ended.grade.reason).split())[:_SHOWN_CHARS]
    naively = None
    if settings.naively and not policy.harmless:
        try:
            naively = await is_rewarded_naively(policy, raw, backend)
        except (SwerlError, FileNotFoundError):
            naively = False
    graded = (ended.verdict.value, ended.reward, seen, naively, time.monotonic() - started, vetting)
    return PolicyResult(policy, outcome, *graded)


async def _vetted(task: Task, backend: SandboxBackend) -> tuple[Task, str]:
    """Return the Task as vetting leaves it, and what vetting did. Raises SandboxError."""
    cleaned = await Runs(backend, LIMITS).remove_leaks(task)
    if places := ", ".join(dict.fromkeys(leak.name for leak in cleaned.scan.leaks)):
        return cleaned.task, f"{_REJECTED}: {places}"
    return cleaned.task, f"vetting removed {', '.join(cleaned.removed) or 'nothing'}"


def judge(policy: Policy, ended: Episode) -> str:
    """Return the problem with the end of a policy's Episode; empty if the policy held."""
    if ended.reward > 0:
        return f"it was rewarded: {ended.grade.reason}"
    # The swap of expectations is random, so the run that betrays a policy is as well, and a policy
    # that looks for signs of a swap may fail in the first run already.
    is_random = policy.stopped_by is Defence.BLIND or policy.kind in GROUNDS
    unpaid = {policy.verdict, *(_UNPAID if is_random else ())}
    if ended.verdict not in unpaid:
        return f"it is {ended.verdict} and not {policy.verdict}: {ended.grade.reason}"
    is_early = is_random and ended.verdict is Verdict.UNSOLVED
    if not is_early and not _is_visible(policy.stopped_by, ended):
        return f"something else stopped it than declared: {ended.grade.reason}"
    return ""


def _is_visible(defence: Defence, ended: Episode) -> bool:
    """Return True if the Episode shows the declared defence, or if the defence leaves no trace."""
    grade = ended.grade
    if defence is Defence.DROPPED:
        return bool(grade.restored)
    if defence is Defence.BLIND:
        return grade.blind in (Blind.FORGED, Blind.UNSTEADY)
    if defence in (Defence.FUTURE, Defence.NETWORK, Defence.SIZE, Defence.NOT_TAKEN):
        return not ended.patch
    return True


async def is_rewarded_naively(policy: Policy, task: Task, backend: SandboxBackend) -> bool:
    """Return True if a grader without defences rewards the policy. Raises SandboxError.

    This proves that the policy cheats. The grader works in the agent's own sandbox, which still
    holds everything, adds only tests that the repository lacks, cuts the log at well-known markers,
    and believes the last line about a test.
    """
    limits = LANGUAGE_LIMITS if policy.kind in GROUNDS else LIMITS
    async with backend.open(task.image, limits, workdir=task.workdir) as opened:
        await set_up(opened, task)
        for command in policy.commands:
            await opened.run(
                ["bash", "-c", command], cwd=task.workdir, timeout_s=_STEP_S, stdin=b""
            )
        await _add_tests(opened, task)
        return await _grade_naively(opened, task)


async def _add_tests(opened: Sandbox, task: Task) -> None:
    spec = task.grading
    if spec.test_patch:
        await opened.run(
            ["bash", "-c", _APPLY_TESTS],
            cwd=task.workdir,
            timeout_s=_STEP_S,
            stdin=spec.test_patch.encode(),
        )
    inside = {f"{task.workdir}/{path}": text for path, text in spec.test_files.items()}
    for path, text in {**inside, **spec.files}.items():
        own = path.removeprefix(f"{task.workdir}/")
        exists = ["sh", "-c", f"test -e '{path}' || git cat-file -e 'HEAD:{own}'"]
        known = await opened.run(exists, cwd=task.workdir, timeout_s=_STEP_S)
        if known.exit_code:
            await opened.write(path, file_bytes(text))


async def _grade_naively(opened: Sandbox, task: Task) -> bool:
    spec = task.grading
    script = f"exec 2>&1; echo '{START}'; ({spec.test_command}); code=$?; echo '{END}'; exit $code"
    done = await opened.run(
        ["bash", "-c", script],
        cwd=task.workdir,
        env=dict(spec.env),
        timeout_s=spec.timeout_s,
        stdin=b"",
    )
    if spec.report_path:
        return (await opened.read(spec.report_path)).strip() == b"1"
    if spec.log_parser in _LANGUAGE_PARSERS:
        found = find_parser(spec.log_parser)(done.text)
        if all(found.get(each) in _NAIVELY_GOOD for each in _declared(spec)):
            return True
    if spec.fail_to_pass:
        last: dict[str, bool] = {}
        for word, name, shown, end in _TEST_LINE.findall(done.text.split(END)[0].split(START)[-1]):
            last[name or shown] = (word or end) in _PASSED
        return all(last.get(test, False) for test in _declared(spec))
    return done.exit_code == 0


def _declared(spec: GradingSpec) -> tuple[str, ...]:
    return (*spec.fail_to_pass, *spec.pass_to_pass)
