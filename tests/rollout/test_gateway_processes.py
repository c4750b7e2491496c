"""Episodes whose session lives in a gateway process of its own: learned from, and lost with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swerl.core.chat import Message
from swerl.core.contracts import EngineSetup
from swerl.core.errors import RecipeError
from swerl.core.grade import Verdict
from swerl.core.sample import to_samples
from swerl.core.sandbox import Limits
from swerl.core.task import Task
from swerl.core.turn import Sampling
from swerl.gateway.limits import SessionLimits
from swerl.gateway.pool import GatewayPool
from swerl.recipe.schema import Recipe
from swerl.rollout import episode, wiring
from swerl.rollout.parts import Parts
from swerl.sandboxes import local
from tests.gateway._fakes import RecordingEngine
from tests.gateway._wire_engine import wired
from tests.rollout.test_episode import BUDGETS, FAMILY, Replies, gold, parts, task

__all__ = ["task"]

ASK_FROM_INSIDE = """
import json, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
asked = urllib.request.Request(sys.argv[1] + "/v1/messages", body)
print(json.load(urllib.request.urlopen(asked))["content"][0]["text"])
"""


@asynccontextmanager
async def served(
    engine: RecordingEngine, log_dir: Path
) -> AsyncIterator[tuple[GatewayPool, Parts]]:
    """Two gateway processes in front of the engine, and what Episodes share besides."""
    budgets = BUDGETS.model_copy(update={"model_call_s": 20, "agent_s": 60, "episode_s": 120})
    async with (
        wired(engine) as wire,
        GatewayPool(wire.setup(log_dir), num_processes=2) as pool,
        parts(Replies(), budgets) as shared,
    ):
        yield pool, replace(shared, gateway=pool)


async def test_an_episode_is_solved_and_its_exact_tokens_are_trained(
    task: Task, tmp_path: Path
) -> None:
    engine = RecordingEngine(lines=list(gold(task)))
    async with served(engine, tmp_path) as (_, shared):
        result = await episode.run(task, "00000/one.0", shared)

    assert (result.verdict, result.reward) == ("solved", 1.0)
    [sample] = to_samples(result.trajectory, episode=result.id, task=task.id)
    assert tuple(sample.ids) == engine.calls[-1].prompt + engine.calls[-1].output
    sampled = [one for call in engine.calls for one in call.output]
    assert [one for one, mask in zip(sample.ids, sample.mask, strict=True) if mask] == sampled


class Deadly(RecordingEngine):
    """Has the gateway process killed while the second reply is in the making."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> object:  # type: ignore[override]
        if self.calls:
            os.kill(self.victim(), signal.SIGKILL)
            await asyncio.sleep(3600)
        return await super().generate(ids, sampling, session)

    def victim(self) -> int:
        [busy] = [worker for worker in self.pool._workers if worker.sessions]
        return busy.pid

    pool: GatewayPool


async def test_an_episode_whose_gateway_process_dies_is_infra_and_no_reward_of_zero(
    task: Task, tmp_path: Path
) -> None:
    engine = Deadly(lines=list[Message](gold(task)))
    async with served(engine, tmp_path) as (pool, shared):
        engine.pool = pool
        result = await episode.run(task, "00000/one.0", shared)

    assert result.verdict is Verdict.INFRA
    assert not result.learnable
    assert "process" in result.error
    assert result.trajectory.dropped == {"gateway process lost": len(engine.calls[0].output)}


async def test_a_sandbox_reaches_its_process_through_the_socket_made_inside(
    tmp_path: Path,
) -> None:
    engine = RecordingEngine()
    backend = local.build(local.Options())
    async with (
        served(engine, tmp_path) as (pool, _),
        backend.open("host", Limits(), workdir="/work") as sandbox,
    ):
        session = pool.open("inside", sampling=Sampling(50), limits=SessionLimits())
        url = await sandbox.expose(session)
        asked = await sandbox.run(["python3", "-c", ASK_FROM_INSIDE, url], timeout_s=60)

        assert asked.stdout.strip() == b"Done.", asked.stderr
        assert len((await session.close()).turns) == 1


async def test_an_engine_without_a_url_is_refused_for_several_processes(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"name": "r", "gateway": {"processes": 2}})
    setup = EngineSetup(family=FAMILY, log_dir=tmp_path)

    with pytest.raises(RecipeError, match=r"gateway\.processes = 2") as refused:
        wiring.gateway_of(recipe, Replies(), setup)

    assert "gateway.processes = 1" in refused.value.hint
