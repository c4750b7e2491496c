"""Whole runs of the real Codex: branches, and what goes wrong on the way."""

from __future__ import annotations

import re

import pytest

from swerl.core.chat import Finish, ToolCall
from swerl.gateway.limits import SessionLimits
from swerl.harnesses.codex import Codex

from .brains import (
    FIX,
    LEAD,
    Heard,
    Line,
    Model,
    assert_side_by_side,
    call,
    forgetting,
    leading,
    say,
)
from .helpers import built, task, work

pytestmark = pytest.mark.agents
RESPONSES, CHAT = "0.169.0", "0.94.0"
FEW_TURNS = SessionLimits(max_context_tokens=2**20, max_turns=20)


@pytest.fixture(scope="module", params=[RESPONSES, CHAT])
def harness(request: pytest.FixtureRequest) -> Codex:
    """The newest release, and the last that speaks chat; skips where it cannot be had."""
    found = built("codex", version=request.param)
    assert isinstance(found, Codex)
    return found


def responses(**options: object) -> Codex:
    """Return the newest release."""
    found = built("codex", **options)
    assert isinstance(found, Codex)
    return found


def shell_of(harness: Codex, command: str) -> ToolCall:
    if harness.dialect == "openai-chat":
        return call("shell", command=["sh", "-c", command], timeout_ms=60_000)
    return call("exec_command", cmd=command)


def exec_command(command: str) -> ToolCall:
    return call("exec_command", cmd=command)


def lead(heard: Heard) -> Line:
    """Start two sub-agents with the same words, wait until both have reported, and fix."""
    if not heard.num_replies:
        start = call("multi_agent_v1.spawn_agent", message="A part of it.")
        return say("Two parts.", start, start)
    if FIX in heard.whole:
        return say("Done.")
    if all(f"Report of part{number}." in heard.whole for number in (1, 2)):
        return say("", exec_command(FIX))
    names = list(dict.fromkeys(re.findall(r'"agent_id":"([^"]+)"', heard.whole)))
    wait = call("multi_agent_v1.wait_agent", targets=names, timeout_ms=60_000)
    return say("", wait)


@pytest.mark.parametrize("num_losses", [0, 2])
async def test_sub_agents_work_side_by_side_each_in_a_branch_of_its_own(num_losses: int) -> None:
    model = Model(leading(lead, exec_command, num_losses=num_losses), delay_s=0.2)
    worked = await work(
        responses(sub_agents=True),
        task=task(LEAD),
        model=model,
        limits=FEW_TURNS,
        after="cat part1.txt part2.txt",
    )
    worked.assert_solved()
    assert worked.after == "part1 is done\npart2 is done\n"
    assert_side_by_side(worked.trajectory)
    assert model.num_heard == len(model.calls) + num_losses
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)


async def test_a_history_that_grows_is_put_into_a_summary() -> None:
    model = Model(forgetting(exec_command))
    worked = await work(responses(compact_at=9000), model=model, limits=FEW_TURNS)
    worked.assert_solved()
    # the summary is asked for without tools, so its prompt has a beginning of its own
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)
    assert max(len(prompt) for prompt, _ in model.calls) < 20_000


async def test_a_reply_cut_short_is_sampled_once_and_ends_the_run(harness: Codex) -> None:
    script = [say("word " * 400), say("", shell_of(harness, FIX))]
    worked = await work(harness, script=script, max_new_tokens=600)
    assert worked.exit.limit, worked.exit.log[-2000:]
    assert [turn.finish for turn in worked.trajectory.turns] == [Finish.LENGTH]
    worked.assert_trained_whole()
