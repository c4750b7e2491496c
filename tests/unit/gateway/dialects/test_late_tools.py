"""Tools that the newest Claude Code loads during its work, with the real CLI."""

from __future__ import annotations

import pytest

from swerl.core.chat import Message, Role, ToolCall
from tests.unit.harnesses import helpers as agents

NEWEST = "2.1.330"
SCRIPT = [
    Message(
        Role.ASSISTANT,
        "I search.",
        tool_calls=(
            ToolCall("", "ToolSearch", {"query": "select:NotebookEdit", "max_results": 5}),
        ),
    ),
    Message(
        Role.ASSISTANT,
        tool_calls=(
            ToolCall("", "NotebookEdit", {"notebook_path": "/repo/x.ipynb", "new_source": "1"}),
        ),
    ),
    Message(Role.ASSISTANT, "Done."),
]


@pytest.mark.agents
async def test_claude_code_loads_a_deferred_tool_and_goes_on_in_its_branch() -> None:
    harness = agents.built("claude-code", version=NEWEST)

    worked = await agents.work(harness, script=SCRIPT)

    loaded, called = worked.results
    assert loaded.startswith("[tool NotebookEdit can be called: {")
    assert '"new_source"' in loaded
    assert "has not been read yet" in called
    worked.assert_trained_whole(num_samples=1)
