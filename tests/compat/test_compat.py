"""Real agents play scripted conversations, and every sampled token is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from swerl.core.contracts import Harness
from swerl.core.errors import ImageError
from swerl.engines.families import tiny
from swerl.sandboxes import local
from swerl.sandboxes.local import LocalBackend
from tests.compat.cases import CASES, Agent, Case, End, Fill, RunShell, Say, all_agents
from tests.compat.play import BUDGET_S, play

TRAINED = 0.999
"""Smallest trained share: an agent may end before the reply to a late sub-agent arrives."""
FORKING = {"mini-swe-agent": {"malformed", "refused"}}
"""Agent -> cases in which it removes the model's mistake from its history."""


def plays() -> Iterator[object]:
    for agent in all_agents():
        for case in CASES:
            if agent.can_play(case):
                yield pytest.param(agent, case, id=f"{agent.name}-{case.name}")


async def harness_of(agent: Agent, case: Case) -> Harness:
    try:
        return await asyncio.to_thread(agent.build, case)
    except ImageError as error:
        pytest.skip(f"not fetched: {error}")


@pytest.fixture(scope="module")
def backend() -> LocalBackend:
    return local.build(local.Options())


@pytest.mark.parametrize(("agent", "case"), plays())
async def test_every_sampled_token_is_trained(
    agent: Agent, case: Case, backend: LocalBackend
) -> None:
    harness = await harness_of(agent, case)
    played = await play(harness, case, tiny.build(None), backend)
    assert not played.exit.timed_out, f"it was not done within {BUDGET_S:g} s"
    assert not played.model.lacks
    assert played.end in case.ends, played.exit.log[-500:]
    assert played.is_limited or End.LIMIT not in case.ends, "the context limit was never reached"
    assert played.trained_share >= TRAINED, played.trajectory.dropped
    conversations = {position.conversation for position in played.model.answered}
    assert case.moves.keys() <= conversations | {"main", "after"}, "a sub-agent made no request"
    is_plain = not case.needs and case.name not in {"over-long", *FORKING.get(agent.harness, ())}
    if is_plain:
        assert played.num_branches == 1
    elif case.needs == "sub-agents":
        assert played.num_branches >= 3


async def test_a_script_that_ends_early_or_never_fills_the_context_is_noticed(
    backend: LocalBackend,
) -> None:
    cut = Case("cut", "", {"main": (RunShell(("ls",)), Say(), RunShell(("ls",)), Say())})
    short = Case("short", "", {"main": (Fill(), Say())}, ends=(End.LIMIT, End.DONE))
    harness = Agent("builtin").build(cut)
    assert (await play(harness, cut, tiny.build(None), backend)).end is End.GAVE_UP
    assert not (await play(harness, short, tiny.build(None), backend)).is_limited
