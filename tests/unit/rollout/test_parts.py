"""No sandbox has future commits."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from swerl.core import plugins
from swerl.core.errors import BudgetError, SandboxError
from swerl.core.events import EpisodeEnded, Event, PhaseEnded, ignore
from swerl.core.grade import Verdict
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.gateway.server import Gateway
from swerl.harnesses import builtin
from swerl.rollout.group import run as run_group
from swerl.rollout.parts import Clock, MixedAgent, Parts
from swerl.rollout.sandbox_pool import SandboxPool
from swerl.runs.layout import open_run
from swerl.sandboxes import local
from tests.unit import made

HARNESS = builtin.build(builtin.Options())
SCRIPT = """
git init -q --template= -b main; git config user.name a; git config user.email a@b
echo broken >code.py; git add -A; git commit -qm base
git checkout -q -b later; echo mended >code.py; git commit -qam fix; git checkout -q main
mkdir r2e_tests; echo hidden >r2e_tests/test_1.py
"""


@pytest.fixture
def task(tmp_path: Path) -> Task:
    subprocess.run(["sh", "-ec", SCRIPT], cwd=tmp_path, check=True)
    return made.task("a__b-1", f"dir:{tmp_path}", "/repo")


@pytest.fixture
def pool() -> SandboxPool:
    return SandboxPool(local.build(local.Options()), Limits(disk_mib=256), concurrency=2)


async def test_no_sandbox_has_later_commits_or_old_hidden_tests(
    task: Task, pool: SandboxPool
) -> None:
    heard: list[Event] = []
    clock = Clock("episode", heard.append)
    for opening in (
        pool.for_agent(task, HARNESS, clock.phase("hide_future")),
        pool.for_agent(task, HARNESS, clock.phase("hide_future")),
        pool.for_grading(task),
    ):
        async with opening as prepared:
            sandbox = prepared.sandbox
            script = "git log --all --oneline; git cat-file --batch-all-objects --batch; ls"
            told = await sandbox.run(["sh", "-c", script], cwd="/repo")
            assert "base" in told.text
            assert "mended" not in told.text
            assert "r2e_tests" not in told.text
    assert clock.seconds["hide_future"] > 0
    assert [e.phase for e in heard if isinstance(e, PhaseEnded)] == ["hide_future", "hide_future"]


async def test_a_broken_repository_makes_an_episode_invalid_and_is_tried_once(
    task: Task, pool: SandboxPool, tmp_path: Path
) -> None:
    (tmp_path / ".git/HEAD").write_text("nonsense\n")
    told: list[Event] = []
    family = plugins.load("families", "tiny").build(None)
    absent: Any = None  # nobody asks an engine for a reply
    async with Gateway(engine=absent, family=family) as gateway:
        parts = made.parts(gateway=gateway, sandboxes=pool, harness=HARNESS, emit=told.append)
        with open_run(tmp_path / "run", {}) as folder:
            [group] = await run_group([task], "00000", parts, size=1, folder=folder)
    assert [each.verdict for each in group.episodes] == [Verdict.INVALID]
    assert len([event for event in told if isinstance(event, EpisodeEnded)]) == 1
    assert "cannot be used" in group.episodes[0].grade.reason


def _mixed(seed: int = 0, **shares: float) -> Parts:
    mix = tuple(MixedAgent(name, HARNESS, share) for name, share in shares.items())
    return made.parts(harness=HARNESS, seed=seed, mix=mix)


def test_groups_draw_their_agent_by_share_and_never_one_that_is_held_out() -> None:
    parts = _mixed(none=0.0, few=0.25, most=0.75, held=0.0)
    drawn = Counter(parts.drawn(f"{number:05d}/task").agent for number in range(4000))
    assert drawn.keys() == {"few", "most"}
    assert drawn["few"] / 4000 == pytest.approx(0.25, abs=0.03)


def test_the_draw_depends_on_seed_and_group_alone() -> None:
    shares = {"a": 0.5, "b": 0.5}
    names = [f"{step:05d}/t{task}" for step in range(8) for task in range(8)]
    drawn = [_mixed(**shares).drawn(name).agent for name in names]
    assert drawn == [_mixed(**shares).drawn(name).agent for name in names]
    assert drawn != [_mixed(1, **shares).drawn(name).agent for name in names]
    # A Task meets both agents over the epochs.
    assert len({_mixed(**shares).drawn(f"{step:05d}/t").agent for step in range(20)}) == 2


async def test_budgets_stand_still_while_a_sandbox_opens_or_closes() -> None:
    clock = Clock("episode", ignore)

    @asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        await asyncio.sleep(0.3)
        yield None
        await asyncio.sleep(0.3)

    async def open_and_close() -> None:
        async with clock.opened(slow()):
            await asyncio.sleep(0.01)

    async with clock.budget("episode_s", 0.6), clock.budget("grading_s", 0.5):
        for _ in range(2):
            await open_and_close()
        await asyncio.gather(open_and_close(), open_and_close())
    with pytest.raises(BudgetError, match=r"budgets\.grading_s = 0\.5 s ran out"):
        async with clock.budget("grading_s", 0.5):
            await open_and_close()
            await asyncio.sleep(5)
    with pytest.raises(SandboxError, match=r"open within budgets\.grading_s = 0\.1 s"):
        async with clock.budget("episode_s", 9), clock.budget("grading_s", 0.1):
            await open_and_close()
