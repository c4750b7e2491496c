"""Forced dispatch: the real CLI's lead cannot work by itself, its workers can; both are trained."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from swerl.core.chat import ToolCall
from swerl.harnesses.claude_code import ClaudeCode, Options

from .brains import FIX, LEAD, Heard, Line, Model, assert_side_by_side, call, delegate, say
from .helpers import built, task, work

pytestmark = pytest.mark.agents


@pytest.fixture(scope="module", params=["2.1.143", "2.1.330"])
def harness(request: pytest.FixtureRequest) -> ClaudeCode:
    """One release; skips where it cannot be had."""
    found = built("claude-code", version=request.param, dispatch="forced")
    assert isinstance(found, ClaudeCode)
    return found


def bash(command: str) -> ToolCall:
    return call("Bash", command=command, description="work")


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


async def test_only_workers_change_anything_and_all_is_trained(harness: ClaudeCode) -> None:
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
def test_what_would_undo_it_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="sets tools and agents itself"):
        Options.model_validate({"dispatch": "forced", "version": "2.1.330"} | other)


def test_release_that_lets_its_lead_work_is_refused() -> None:
    with pytest.raises(ValidationError, match="cannot restrict its main thread"):
        Options(dispatch="forced", version="2.1.112")
