"""Whole runs of the real Claude Code, old and new: branches, and what goes wrong on the way."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from swerl.core.chat import ToolCall
from swerl.core.errors import EngineLostError
from swerl.engines.families import tiny
from swerl.gateway.limits import SessionLimits
from swerl.harnesses.claude_code import ClaudeCode, Options

from .brains import (
    FIX,
    LEAD,
    Heard,
    Line,
    Model,
    Says,
    assert_side_by_side,
    call,
    cut_in_a_call,
    delegate,
    forgetting,
    leading,
    say,
)
from .helpers import built, task, work

pytestmark = pytest.mark.agents
JAVASCRIPT, NATIVE, NEWEST = "2.1.112", "2.1.143", "2.1.330"
FEW_TURNS = SessionLimits(max_context_tokens=2**20, max_turns=20)


@pytest.fixture(scope="module", params=[JAVASCRIPT, NATIVE, NEWEST])
def harness(request: pytest.FixtureRequest) -> ClaudeCode:
    """One release; skips where it cannot be had."""
    found = built("claude-code", version=request.param)
    assert isinstance(found, ClaudeCode)
    return found


def bash(command: str) -> ToolCall:
    return call("Bash", command=command, description="Work")


def lead_of(*prompts: str) -> Says:
    def lead(heard: Heard) -> Line:
        steps = [say("Two parts.", *map(delegate, prompts)), say("", bash(FIX)), say("Done.")]
        return steps[heard.num_replies]

    return lead


def with_options(harness: ClaudeCode, **changed: object) -> ClaudeCode:
    return ClaudeCode(harness.options.model_copy(update=changed), harness.bundle)


@pytest.mark.parametrize("prompts", [("Part A.", "Part B."), ("A part.", "A part.")])
async def test_sub_agents_work_side_by_side_each_in_a_branch_of_its_own(
    harness: ClaudeCode, prompts: tuple[str, str]
) -> None:
    # both lose the engine at their first request; the old release does not ask again
    num_losses = 0 if harness.options.version == JAVASCRIPT else 2
    model = Model(leading(lead_of(*prompts), bash, num_losses=num_losses), delay_s=0.2)
    worked = await work(harness, task=task(LEAD), model=model, after="cat part1.txt part2.txt")
    worked.assert_solved()
    assert worked.after == "part1 is done\npart2 is done\n"
    assert_side_by_side(worked.trajectory)
    assert len(model.calls) == 9
    assert model.num_heard == 9 + num_losses
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)


async def test_a_history_that_grows_is_put_into_a_summary(harness: ClaudeCode) -> None:
    model = Model(forgetting(bash))
    worked = await work(with_options(harness, compact_at=9000), model=model, limits=FEW_TURNS)
    worked.assert_solved()
    assert worked.exit.log.count('"subtype":"compact_boundary"') == 1
    # the newest release keeps the last messages beside the summary, so that the summary is a
    # branch of its own
    num_branches = 3 if harness.options.version == NEWEST else 2
    worked.assert_trained_whole(num_samples=num_branches)
    model.assert_trained_exactly(worked.samples)
    assert max(len(prompt) for prompt, _ in model.calls) < 25_000


async def test_a_call_that_breaks_off_is_recovered_from(harness: ClaudeCode) -> None:
    family = tiny.build(None)
    broken = cut_in_a_call(family, say("", bash(FIX)))
    lines: list[Line] = [broken, say("", bash(FIX)), say("Done.")]
    model = Model(lambda heard: lines[heard.num_replies])
    worked = await work(harness, model=model)
    worked.assert_solved()
    assert [turn.malformed_calls for turn in worked.trajectory.turns] == [1, 0, 0]
    worked.assert_trained_whole()
    model.assert_trained_exactly(worked.samples)


async def test_an_engine_that_comes_back_is_asked_again(harness: ClaudeCode) -> None:
    lines: list[Line] = [
        say("", bash("true")),
        EngineLostError("gone"),
        say("", bash(FIX)),
        say("Done."),
    ]
    model = Model(lambda heard: lines[heard.number])
    worked = await work(harness, model=model)
    worked.assert_solved()
    assert worked.failure is None
    worked.assert_trained_whole()
    model.assert_trained_exactly(worked.samples)


async def test_a_context_that_is_full_ends_the_run_or_is_made_smaller(harness: ClaudeCode) -> None:
    model = Model(forgetting(bash))
    limits = SessionLimits(max_context_tokens=16_000, max_turns=20)
    worked = await work(harness, model=model, limits=limits)
    if harness.options.version == NEWEST:
        worked.assert_solved()
    else:
        assert worked.exit.limit
        assert worked.limit == "max_context_tokens"
    assert worked.trajectory.num_sampled_tokens > 0
    model.assert_trained_exactly(worked.samples)


async def test_a_tool_that_is_loaded_late_starts_no_branch() -> None:
    search = call("ToolSearch", query="select:NotebookEdit")
    script = [say("", search), say("", bash(FIX)), say("Done.")]
    worked = await work(built("claude-code", version=NEWEST), script=script)
    worked.assert_solved()
    assert len(worked.trajectory.turns) == 3
    worked.assert_trained_whole()


def says(heard: Heard) -> Line:
    """The lead tries to work by itself, then hands two parts out; a worker does its own."""
    if LEAD in heard.asked:
        parts = [delegate(part, kind="worker") for part in ("Mend add.", "Count the files.")]
        steps = [
            say("", bash("echo mine >calc.py")),
            say("", call("Write", file_path="calc.py", content="mine")),
            say("Two parts.", *parts),
            say("Done."),
        ]
        return steps[heard.num_replies]
    command = FIX if "Mend add." in heard.whole else "ls | wc -l"
    return [say("", bash(command)), say("It is done.")][heard.num_replies]


@pytest.mark.parametrize("version", [NATIVE, NEWEST])
async def test_only_workers_change_anything_and_all_is_trained(version: str) -> None:
    """Forced dispatch: the lead cannot work by itself, its workers can."""
    harness = built("claude-code", version=version, dispatch="forced")
    model = Model(says, delay_s=0.2)
    worked = await work(harness, task=task(LEAD), model=model)
    assert worked.exit.code == 0, worked.exit.log
    worked.assert_fixed()
    refused = [text for text in worked.results if "No such tool available" in text]
    assert len(refused) == 2
    assert_side_by_side(worked.trajectory)
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)


@pytest.mark.parametrize("other", [{"bare": True}, {"tools": ["Bash"]}])
def test_what_would_undo_a_forced_dispatch_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="sets tools and agents itself"):
        Options.model_validate({"dispatch": "forced", "version": "2.1.330"} | other)


def test_a_release_that_lets_its_lead_work_cannot_force_a_dispatch() -> None:
    with pytest.raises(ValidationError, match="cannot restrict its main thread"):
        Options(dispatch="forced", version="2.1.112")
