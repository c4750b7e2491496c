"""opencode: what it is started with, how its ends are told apart, and runs of the real CLI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swerl.core.chat import Role, ToolCall
from swerl.core.contracts import Endpoint
from swerl.harnesses import opencode
from swerl.harnesses.opencode import OpenCode, Options

from .brains import FIX, LEAD, Heard, Line, Model, call, leading, say
from .helpers import TASK, Recorder, built, task, work

ENDPOINT = Endpoint("http://127.0.0.1:8080", "key-1", "policy")


async def configured(**options: Any) -> dict[str, Any]:
    """Return the configuration that the CLI gets with these options."""
    env = (await started(**options))["env"]
    found: dict[str, Any] = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    return found


async def started(**options: Any) -> dict[str, Any]:
    """Return the call that starts the CLI with these options."""
    sandbox = Recorder()
    await OpenCode(Options(**options), ()).run(sandbox, TASK, ENDPOINT, 90.0)  # type: ignore[arg-type]
    return sandbox.calls[0]


async def test_a_slow_model_is_waited_for() -> None:
    options = (await configured())["provider"]["swerl"]["options"]
    waits = {name: options[name] for name in ("timeout", "headerTimeout", "chunkTimeout")}
    assert waits == {"timeout": False, "headerTimeout": False, "chunkTimeout": 86_400_000}


@pytest.mark.parametrize(
    ("event", "limit"),
    [
        ({"type": "step_finish", "part": {"reason": "length"}}, True),
        ({"type": "step_finish", "part": {"reason": "stop"}}, False),
        ({"type": "error", "error": {"data": {"message": "prompt is too long: 9 > 8"}}}, True),
        ({"type": "error", "error": {"data": {"message": "the engine failed"}}}, False),
    ],
)
async def test_limits_are_told_from_breakdowns(event: dict[str, Any], limit: bool) -> None:
    before = {"type": "step_finish", "part": {"reason": "tool-calls"}}
    log = f"{json.dumps(before)}\n{json.dumps(event)}\n".encode()
    done = await OpenCode(Options(), ()).run(Recorder(log), TASK, ENDPOINT, 9.0)  # type: ignore[arg-type]
    assert done.limit == limit


@pytest.mark.parametrize(("machine", "pinned"), [("x86_64", True), ("aarch64", False)])
def test_the_machine_decides_the_package(
    monkeypatch: pytest.MonkeyPatch, machine: str, pinned: bool
) -> None:
    asked = []

    def fetch(package: str, version: str, *, integrity: str | None) -> Path:
        asked.append((package, version, bool(integrity)))
        return Path("/cache")

    monkeypatch.setattr(opencode._bundles, "fetch", fetch)
    monkeypatch.setattr(opencode.platform, "machine", lambda: machine)
    opencode.fetch(opencode.DEFAULT_VERSION)
    assert asked == [(opencode._PACKAGES[machine], opencode.DEFAULT_VERSION, pinned)]


@pytest.fixture(scope="module")
def harness() -> OpenCode:
    """The real CLI; skips where it cannot be had."""
    found = built("opencode")
    assert isinstance(found, OpenCode)
    return found


def bash(command: str) -> ToolCall:
    return call("bash", command=command, description="Work")


def delegate(prompt: str) -> ToolCall:
    """Return a call that starts a sub-agent and waits for it."""
    return call("task", description="A part", prompt=prompt, subagent_type="general")


@pytest.mark.agents
async def test_sub_agents_work_each_in_a_branch_of_its_own(harness: OpenCode) -> None:
    def lead(heard: Heard) -> Line:
        both = say("Two parts.", delegate("Part A."), delegate("Part B."))
        return [both, say("", bash(FIX)), say("Done.")][heard.num_replies]

    model = Model(leading(lead, bash), delay_s=0.1)
    worked = await work(harness, task=task(LEAD), model=model)
    worked.assert_solved()
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)


@pytest.mark.agents
async def test_configuration_of_the_repository_is_not_loaded(harness: OpenCode) -> None:
    """What AGENTS.md says is read, as the CLI does; what would configure the CLI is not."""
    spoil = """
    echo 'Mind the gap.' >AGENTS.md
    echo '{"model": "other/model", "instructions": ["spoiled.md"]}' >opencode.json
    echo 'Spoiled.' >spoiled.md
    """
    worked = await work(harness, script=[say("Done.")], before=spoil)
    assert worked.exit.code == 0, worked.exit.log
    system = worked.told[0].new_messages[0]
    assert system.role is Role.SYSTEM
    assert "Mind the gap." in system.text
    assert "Spoiled." not in system.text
