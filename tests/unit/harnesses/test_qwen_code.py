"""Qwen Code: what it is started with, how its ends are told apart, and runs of the real CLI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swerl.core.chat import ToolCall
from swerl.core.contracts import Endpoint
from swerl.harnesses.qwen_code import Options, QwenCode

from .brains import LEAD, Heard, Line, Model, call, delegate, leading, say
from .helpers import TASK, Recorder, built, task, work

ENDPOINT = Endpoint("http://127.0.0.1:8080", "key-1", "policy")


async def started(prompt: str = "Fix add.", **options: Any) -> dict[str, Any]:
    """Return the call that starts the CLI with these options."""
    sandbox = Recorder()
    harness = QwenCode(Options(**options), ())
    await harness.run(sandbox, task(prompt), ENDPOINT, 90.0)  # type: ignore[arg-type]
    return sandbox.calls[0]


async def generation(**options: Any) -> dict[str, Any]:
    """Return the settings of model calls that the CLI gets."""
    settings = json.loads((await started(**options))["env"]["SWERL_QWEN_SETTINGS"])
    found: dict[str, Any] = settings["model"]["generationConfig"]
    return found


async def test_a_slow_model_is_waited_for() -> None:
    found = await generation()
    assert (found["timeout"], found["streamIdleTimeoutMs"]) == (90_000, 0)


@pytest.mark.parametrize(
    ("code", "error", "limit"),
    [
        (1, {"message": "[API Error: 400 prompt is too long: 9 tokens > 8 maximum]"}, True),
        (1, {"message": "Context is too large to send safely after automatic compression."}, True),
        (1, {"message": "[API Error: 500 the engine failed]"}, False),
        (0, None, False),
    ],
)
async def test_limits_are_told_from_breakdowns(
    code: int, error: dict[str, str] | None, limit: bool
) -> None:
    result = {"type": "result"} | ({"error": error} if error else {})
    sandbox = Recorder((json.dumps(result) + "\n").encode(), exit_code=code)
    done = await QwenCode(Options(), ()).run(sandbox, TASK, ENDPOINT, 9.0)  # type: ignore[arg-type]
    assert (done.code, done.limit) == (code, limit)


@pytest.fixture(scope="module")
def harness() -> QwenCode:
    """The real CLI; skips where it cannot be had."""
    found = built("qwen-code")
    assert isinstance(found, QwenCode)
    return found


def shell(command: str) -> ToolCall:
    return call("run_shell_command", command=command, is_background=False)


FIX = (
    say("", call("read_file", file_path="/repo/calc.py")),
    say("", call("edit", file_path="/repo/calc.py", old_string="a - b", new_string="a + b")),
    say("Done."),
)
"""Replies that solve the task; the CLI lets no file be changed that was not read."""


@pytest.mark.agents
async def test_sub_agents_work_each_in_a_branch_of_its_own(harness: QwenCode) -> None:
    def lead(heard: Heard) -> Line:
        both = say("Two parts.", delegate("Part A.", "agent"), delegate("Part B.", "agent"))
        return [both, *FIX][heard.num_replies]

    model = Model(leading(lead, shell), delay_s=0.1)
    worked = await work(harness, task=task(LEAD), model=model)
    worked.assert_solved()
    assert {"Report of part1.", "Report of part2."} <= set(worked.results)
    assert b"cat part1.txt" in worked.exit.records
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)
