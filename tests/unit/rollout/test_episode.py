"""Every way an Episode can end, on real sandboxes and a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core import experts, plugins
from swerl.core.changes import FileEdit, edits
from swerl.core.chat import Finish, Message
from swerl.core.contracts import Endpoint, Engine, Exit, Sandbox, SandboxBackend
from swerl.core.episode import Episode, Status
from swerl.core.errors import EngineLostError, PluginError, RunError, SandboxError
from swerl.core.events import Event, Notice, ignore
from swerl.core.experts import ExpertSpool, open_spool
from swerl.core.grade import Verdict
from swerl.core.learning import WeightRef
from swerl.core.sample import to_samples
from swerl.core.sandbox import Limits, Mount
from swerl.core.task import Task
from swerl.core.turn import Completion, RoutedExperts, Sampling
from swerl.gateway.server import Gateway
from swerl.harnesses import builtin
from swerl.harnesses._cli import call as say
from swerl.recipe.schema import BudgetsSection, RolloutSection
from swerl.rollout import episode, group, record, step
from swerl.rollout.parts import Parts
from swerl.rollout.reward import reward_of
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.runs.layout import open_run
from swerl.sandboxes import local

FAMILY = plugins.load("families", "tiny").build(None)
BUDGETS = BudgetsSection(
    model_call_s=1, tool_s=2, agent_s=3, grading_s=20, episode_s=30, sandbox_s=60
)


class Replies:
    """An Engine that gives these replies in turn; from an exception on it raises that."""

    def __init__(self, *replies: Message | Exception, delay_s: float = 0.0) -> None:
        self._replies = list(replies)
        self._delay_s = delay_s
        self.num_open = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        self.num_open += 1
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self.num_open -= 1
        if isinstance(reply := self._replies[0], Exception):
            raise reply
        self._replies.pop(0)
        said = tuple(FAMILY.encode_reply(reply))
        return Completion(said, (-0.25,) * len(said), Finish.STOP, "7")

    async def abort(self, session: str) -> None: ...
    async def pause(self) -> None: ...
    async def load(self, weights: WeightRef) -> str:
        return weights.version

    async def resume(self) -> None: ...
    async def close(self) -> None: ...


class BrokenBackend:
    """A sandbox backend of which the first `failures` sandboxes fail, or the `late` one waits."""

    def __init__(self, failures: int = 0, *, late: int = 0) -> None:
        self._real = local.build(local.Options())
        self.failures = failures
        self.late = late

    @asynccontextmanager
    async def open(
        self, image: str, limits: Limits, *, workdir: str, mounts: Sequence[Mount] = ()
    ) -> AsyncIterator[Sandbox]:
        if self.failures:
            self.failures -= 1
            raise SandboxError("no sandbox today")
        self.late -= 1
        await asyncio.sleep(1.5 * (self.late == 0))
        async with self._real.open(image, limits, workdir=workdir, mounts=mounts) as sandbox:
            yield sandbox


def gold(task: Task) -> Sequence[Message]:
    """The replies of the known solution."""
    return builtin.build(builtin.Options()).script(edits(task.gold_patch), task.workdir)


@asynccontextmanager
async def parts(
    engine: Engine,
    budgets: BudgetsSection = BUDGETS,
    backend: SandboxBackend | None = None,
    spool: ExpertSpool | None = None,
) -> AsyncIterator[Parts]:
    backend = backend or local.build(local.Options())
    async with Gateway(engine=engine, family=FAMILY, spool=spool) as gateway:
        yield Parts(
            gateway=gateway,
            sandboxes=SandboxPool(backend, Limits(), concurrency=2),
            harness=builtin.build(builtin.Options()),
            reward=reward_of("solved"),
            rollout=RolloutSection(max_new_tokens=800, max_context_tokens=8000, max_turns=8),
            budgets=budgets,
            seed=0,
            emit=ignore,
            spool=spool,
        )


async def attempt(task: Task, engine: Engine, budgets: BudgetsSection = BUDGETS) -> Episode:
    """Run one Episode."""
    async with parts(engine, budgets) as shared:
        return await episode.run(task, "00000/one.0", shared)


async def test_the_known_solution_is_solved_and_trains_each_sampled_token(task: Task) -> None:
    result = await attempt(task, Replies(*gold(task)))
    assert (result.verdict, result.reward, result.status) == ("solved", 1.0, Status.COMPLETED)
    [sample] = to_samples(result.trajectory, episode=result.id, task=task.id)
    assert sample.num_trained_tokens == result.trajectory.num_sampled_tokens > 0
    assert sample.weight_versions == ("7",)
    assert {"boot", "agent", "diff", "grade_boot", "grade", "test", "total"} <= set(result.timings)


async def test_an_engine_that_dies_mid_turn_is_infra_and_keeps_finished_turns(task: Task) -> None:
    look = say("bash", command="ls")
    result = await attempt(task, Replies(look, EngineLostError("the engine is gone")))
    assert result.verdict is Verdict.INFRA
    assert not result.learnable
    assert "the engine is gone" in result.error
    assert len(result.trajectory.turns) == 1


@pytest.mark.parametrize(
    ("budget", "verdict", "says"),
    [
        ({"model_call_s": 0.1}, Verdict.INFRA, "no reply within 0.1 s"),
        ({"episode_s": 2.0, "model_call_s": 9.0}, Verdict.TIMEOUT, "episode_s = 2"),
    ],
)
async def test_a_slow_engine_is_infra_by_the_call_and_a_timeout_by_the_episode(
    task: Task, budget: dict[str, float], verdict: Verdict, says: str
) -> None:
    """Tokens bound the policy's reply; time bounds the engine."""
    engine = Replies(*gold(task), delay_s=2.5)
    result = await attempt(task, engine, BUDGETS.model_copy(update=budget))
    assert result.verdict is verdict
    assert says in (result.error or result.grade.reason)
    assert engine.num_open == 0


async def test_an_agent_over_budget_is_a_timeout_that_keeps_its_turns(task: Task) -> None:
    wait = say("bash", command="sleep 30")
    tight = BUDGETS.model_copy(update={"model_call_s": 0.3, "tool_s": 0.5, "agent_s": 0.6})
    result = await attempt(task, Replies(say("bash", command="ls"), wait, wait, wait), tight)
    assert (result.verdict, result.status) == (Verdict.TIMEOUT, Status.TIMEOUT)
    assert "agent_s = 0.6" in result.grade.reason
    assert len(result.trajectory.turns) >= 2


async def test_tests_over_budget_are_a_timeout(task: Task) -> None:
    spec = replace(task.grading, test_command="sleep 30", timeout_s=0.2)
    result = await attempt(replace(task, grading=spec), Replies(*gold(task)))
    assert result.verdict is Verdict.TIMEOUT
    assert result.patch


@pytest.mark.parametrize(("late", "budget"), [(1, "episode_s"), (2, "grading_s")])
async def test_a_sandbox_that_opens_late_is_infra(task: Task, late: int, budget: str) -> None:
    tight = BUDGETS.model_copy(update={budget: 1.0})
    async with parts(Replies(*gold(task)), tight, BrokenBackend(late=late)) as shared:
        result = await episode.run(task, "00000/one.0", shared)
    assert (result.verdict, result.learnable) == (Verdict.INFRA, False), result.grade.reason
    assert f"no sandbox could open within budgets.{budget} = 1 s" in result.error


@pytest.mark.parametrize("ended", [Exit(127, log="sh: 1: agent: not found\n"), Exit(0, True)])
async def test_an_agent_that_asks_the_model_nothing_is_infra(task: Task, ended: Exit) -> None:
    async with parts(Replies(*gold(task))) as shared:
        result = await episode.run(task, "x.0", replace(shared, harness=BrokenHarness(ended)))
    assert result.verdict is Verdict.INFRA
    assert f"(exit code {ended.code})" in result.error and ended.log.strip() in result.error


class BrokenHarness:
    """An agent with a bug of its own, or of a part that it calls, or that does not start."""

    dialect, inside = "anthropic", False

    def __init__(self, outcome: BaseException | Exit) -> None:
        self._outcome = outcome

    def mounts(self) -> Sequence[Mount]:
        return ()

    async def install(self, sandbox: Sandbox) -> None: ...

    async def run(self, sandbox: Sandbox, task: Task, endpoint: Endpoint, budget_s: float) -> Exit:
        if isinstance(self._outcome, Exit):
            return self._outcome
        raise self._outcome

    def script(self, edits: Sequence[FileEdit], workdir: str) -> Sequence[Message]:
        return ()


class BuiltInBroken(BrokenHarness):
    __module__ = "swerl.harnesses.broken"


async def test_a_bug_that_one_episode_meets_is_its_own_and_visible(task: Task) -> None:
    errors = ExceptionGroup("two", [KeyError("no such key"), OverflowError("too large")])
    events: list[Event] = []
    async with parts(Replies()) as shared:
        broken = replace(shared, harness=BuiltInBroken(errors), emit=events.append)
        result = await episode.run(task, "00000/one.0", broken)
    assert (result.verdict, result.learnable, result.fault) == (Verdict.INFRA, False, "")
    assert "unexpected error: ExceptionGroup" in result.error
    assert "Traceback" in result.log and "KeyError: 'no such key'" in result.log
    [notice] = [event for event in events if isinstance(event, Notice)]
    assert "episode 00000/one.0 met a bug" in notice.text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return attempt.nothing", "mine.py:2: AttributeError: 'Attempt' object has no attribute"),
        ("return float('nan')", "mine.py: it returned nan for "),
        ("return None", "mine.py: it returned None for "),
    ],
)
async def test_an_error_in_a_reward_keeps_the_episode_and_ends_the_run(
    task: Task, tmp_path: Path, body: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def reward(attempt):\n    {body}\n")
    async with parts(Replies(say("submit"))) as shared:
        changed = replace(shared, reward=reward_of(f"{tmp_path}/mine.py"))
        with (
            open_run(tmp_path / "run", {}) as folder,
            pytest.raises(ExceptionGroup) as caught,
        ):
            await group.run_one(task, "00000", changed, size=1, folder=folder)
    (error,) = caught.value.exceptions
    assert isinstance(error, PluginError)
    assert f"REWARD FAILED {tmp_path}/{says}" in str(error)
    [path] = (tmp_path / "run" / "episodes" / "00000").iterdir()
    result = record.read(path)
    assert (result.verdict, result.learnable, result.fault) == (Verdict.INVALID, False, str(error))
    assert len(result.trajectory.turns) == 1 and result.trajectory.num_sampled_tokens > 0


async def test_an_error_in_a_users_agent_or_grader_is_named_and_never_infra(
    task: Task, tmp_path: Path
) -> None:
    lines = ("def build():", "    return Mine()", "class Mine:")
    method = ("    async def grade(self, *_):", "        1 / 0")
    (tmp_path / "grader.py").write_text("\n".join((*lines, *method)))
    graded = replace(task, grading=replace(task.grading, grader=f"{tmp_path}/grader.py"))
    async with parts(Replies(say("submit"))) as shared:
        broken = replace(shared, harness=BrokenHarness(KeyError("no such key")))
        agent = await episode.run(task, "00000/one.0", broken)
        grader = await episode.run(graded, "00000/two.0", shared)
    assert agent.fault.startswith(f"AGENT FAILED {__file__}:")
    assert agent.fault.endswith("KeyError: 'no such key'")
    assert (
        grader.fault == f"GRADER FAILED {tmp_path}/grader.py:5: ZeroDivisionError: division by zero"
    )
    assert len(grader.trajectory.turns) == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
async def test_a_request_to_stop_ends_the_run(task: Task, error: type[BaseException]) -> None:
    async with parts(Replies()) as shared:
        with pytest.raises(error):
            await episode.run(task, "x.0", replace(shared, harness=BrokenHarness(error())))


async def test_a_bug_in_every_episode_ends_the_run(task: Task, tmp_path: Path) -> None:
    bug = BuiltInBroken(KeyError("no such key"))
    with open_run(tmp_path / "run", {}) as folder:
        async with parts(Replies()) as shared:
            rollout = shared.rollout.model_copy(
                update={"groups_per_step": 1, "episodes_per_group": 2}
            )
            broken = replace(shared, harness=bug, rollout=rollout)
            with pytest.raises(RunError, match="2 of 2 episodes were lost: an unexpected error"):
                await step.run_step([task], 0, broken, folder)


@pytest.mark.parametrize(
    "change",
    [
        "mkdir setup.cfg && touch setup.cfg/x",
        "ln -s setup.cfg setup.cfg",
        "ln -s pyproject.toml pyproject.toml",
        "ln -s /dev/zero pyproject.toml",
        "mkfifo setup.cfg",
        "mkdir -p docs && ln -s package.json docs/package.json",
        "mkdir package.json && touch package.json/package.json",
        "mkdir $'a\\nb' && touch $'a\\nb/\\xff'",
    ],
)
async def test_no_file_of_the_agent_is_a_fault_of_the_infrastructure(
    task: Task, change: str
) -> None:
    result = await after(task, f"rm -rf setup.cfg package.json pyproject.toml; {change}")
    assert result.verdict is Verdict.UNSOLVED, result.error


async def test_an_agent_that_destroys_its_repository_is_graded_as_ever(task: Task) -> None:
    script = "rm -rf .git; grep -rl 'a // b' . | xargs sed -i 's|a // b|a * b|'"
    result = await after(task, script)
    assert result.verdict is Verdict.SOLVED
    assert "+    return a * b" in result.patch


LEFTOVERS = {
    "a binary of 9 MB": "head -c 9000000 /dev/urandom >app",
    "25,000 files": "mkdir made; cd made; seq 25000 | xargs touch",
    "a full disk": "cat /dev/zero >full || true; yes >rest || true",
}


@pytest.mark.integration
@pytest.mark.parametrize("leftover", LEFTOVERS)
async def test_a_large_leftover_is_left_out_and_the_rest_is_graded(
    task: Task, leftover: str
) -> None:
    script = "grep -rl 'a // b' . | xargs sed -i 's|a // b|a * b|'; " + LEFTOVERS[leftover]
    result = await after(task, script)
    assert result.verdict is Verdict.SOLVED, (result.grade.reason, result.error)
    assert "+    return a * b" in result.patch
    assert result.num_left >= 1


@pytest.mark.parametrize(("failures", "first"), [(1, "solved"), (3, "infra")])
async def test_an_episode_lost_to_infrastructure_is_retried_alone_and_again_on_resume(
    task: Task, tmp_path: Path, failures: int, first: str
) -> None:
    backend = BrokenBackend(failures=failures)
    with open_run(tmp_path / "run", {}) as folder:
        async with parts(Replies(*gold(task)), backend=backend) as shared:
            [found] = await group.run([task], "00000", shared, size=1, folder=folder)
            [again] = await group.run([task], "00000", shared, size=1, folder=folder)
    assert [e.verdict for e in found.episodes] == [first]
    assert [e.verdict for e in again.episodes] == ["solved"]
    assert (again == found) is (first == "solved")
    assert record.is_finished(folder.episode("00000", f"{task.id}.0"))


class RoutingReplies(Replies):
    """Records the low byte of each position; in a first attempt only its first reply comes."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        if "+" not in session and sampling.num_routed:
            raise EngineLostError("gone")
        done = await super().generate(ids, sampling, session)
        end = len(ids) + len(done.ids) - 1
        data = bytes(position % 256 for position in range(sampling.num_routed, end))
        return replace(done, routed=RoutedExperts(sampling.num_routed, 1, 1, 1, data))


async def test_experts_go_from_the_reply_to_the_episodes_folder_and_leave_nothing(
    task: Task, tmp_path: Path
) -> None:
    first, *_ = gold(task)
    engine = RoutingReplies(first, *gold(task))
    with open_run(tmp_path / "run", {}) as folder, open_spool(folder.spool) as spool:
        async with parts(engine, spool=spool) as shared:
            [found] = await group.run([task], "00000", shared, size=1, folder=folder)
        assert not list(folder.spool.rglob("*.bin"))
    [result] = found.episodes
    assert (result.verdict, result.lost_tokens > 0) == ("solved", True)
    path = folder.episode("00000", f"{task.id}.0")
    assert record.read(path) == result
    [row] = to_samples(result.trajectory, episode=result.id, task=task.id)
    assert {piece.data.file for piece in row.routed} == {path / "experts.bin"}
    recorded = b"".join(experts.read(row.routed))
    assert recorded == bytes(position % 256 for position in range(len(row.ids) - 1))


async def after(task: Task, command: str) -> Episode:
    """Run an Episode whose agent only gives this command and hands in."""
    return await attempt(task, Replies(say("bash", command=command), say("submit")))


async def test_a_command_that_kills_all_processes_counts_as_unsolved(task: Task) -> None:
    result = await after(task, "kill -9 -1")
    assert result.verdict == "unsolved", result.error
