"""Whole runs of the real Codex: a summary of its history, and a reply cut short."""

from __future__ import annotations

import pytest

from swerl.core.chat import Finish, ToolCall
from swerl.gateway.limits import SessionLimits
from swerl.harnesses.codex import Codex

from .brains import FIX, Model, call, forgetting, say
from .helpers import built, work

pytestmark = pytest.mark.agents
FEW_TURNS = SessionLimits(max_context_tokens=2**20, max_turns=20)


def codex(**options: object) -> Codex:
    """Return the newest release; skips where it cannot be had."""
    harness = built("codex", **options)
    assert isinstance(harness, Codex)
    return harness


def exec_command(command: str) -> ToolCall:
    return call("exec_command", cmd=command)


async def test_a_history_that_grows_is_put_into_a_summary() -> None:
    model = Model(forgetting(exec_command))
    worked = await work(codex(compact_at=9000), model=model, limits=FEW_TURNS)
    worked.assert_solved()
    # the summary is asked for without tools, so its prompt has a beginning of its own
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)
    assert max(len(prompt) for prompt, _ in model.calls) < 20_000


async def test_a_reply_cut_short_is_sampled_once_and_ends_the_run() -> None:
    script = [say("word " * 400), say("", exec_command(FIX))]
    worked = await work(codex(), script=script, max_new_tokens=600)
    assert worked.exit.limit, worked.exit.log[-2000:]
    assert [turn.finish for turn in worked.trajectory.turns] == [Finish.LENGTH]
    worked.assert_trained_whole()
