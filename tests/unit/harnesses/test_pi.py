"""pi: what it is started with, how its ends are told apart, and runs of the real CLI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swerl.core.chat import Message, Role, ToolCall
from swerl.core.contracts import Endpoint, Harness
from swerl.harnesses import pi
from swerl.harnesses.pi import Options, Pi

from .helpers import TASK, Recorder, built, work

DONE = Message(Role.ASSISTANT, "Done.")
ENDPOINT = Endpoint("http://127.0.0.1:8080", "key-1", "policy")


async def started(**options: Any) -> dict[str, Any]:
    """Return the call that starts the CLI with these options."""
    sandbox = Recorder()
    await Pi(Options(**options), ()).run(sandbox, TASK, ENDPOINT, 90.0)  # type: ignore[arg-type]
    return sandbox.calls[0]


async def test_the_cli_is_pointed_at_the_gateway() -> None:
    started_with = await started()
    (provider,) = json.loads(started_with["env"]["SWERL_PI_MODELS"])["providers"].values()
    assert provider["baseUrl"] == "http://127.0.0.1:8080/v1"
    assert [model["id"] for model in provider["models"]] == ["policy"]
    assert started_with["env"][provider["apiKey"]] == "key-1"
    assert (started_with["cwd"], started_with["timeout_s"]) == ("/repo", 90.0)
    assert started_with["stdin"] == b"Fix add."


async def test_a_broken_stream_is_not_asked_for_again_and_a_slow_one_is_waited_for() -> None:
    retry = json.loads((await started())["env"]["SWERL_PI_SETTINGS"])["retry"]
    assert retry == {"enabled": False, "provider": {"timeoutMs": 90_000, "maxRetries": 2}}


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ({"stopReason": "length"}, True),
        ({"stopReason": "error", "errorMessage": "400 prompt is too long: 9 tokens"}, True),
        ({"stopReason": "error", "errorMessage": "terminated"}, False),
        ({"stopReason": "stop"}, False),
    ],
)
async def test_limits_are_told_from_breakdowns(message: dict[str, str], limit: bool) -> None:
    entries = [
        {"type": "message", "message": {"role": "assistant", "stopReason": "toolUse"}},
        {"type": "message", "message": {"role": "assistant", **message}},
        {"type": "message", "message": {"role": "toolResult"}},
    ]
    session = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    done = await Pi(Options(), ()).run(Recorder(session), TASK, ENDPOINT, 9.0)  # type: ignore[arg-type]
    assert done.limit == limit


@pytest.mark.parametrize("version", [pi.DEFAULT_VERSION, "0.87.1"])
def test_tested_releases_are_pinned_with_all_that_they_depend_on(version: str) -> None:
    lock = json.loads((pi._LOCKS / f"pi-{version}.json").read_text())
    packages = {where: package for where, package in lock["packages"].items() if where}
    assert packages[f"node_modules/{pi._package(version)}"]["version"] == version
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())


@pytest.mark.parametrize(
    ("version", "package", "oldest_node", "pinned"),
    [
        ("0.73.1", "@mariozechner/pi-coding-agent", (20, 6), True),
        ("0.70.0", "@mariozechner/pi-coding-agent", (20, 6), False),
        ("0.74.0", "@earendil-works/pi-coding-agent", (22, 19), False),
    ],
)
async def test_the_release_decides_the_package_the_node_and_the_lock(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    package: str,
    oldest_node: tuple[int, int],
    pinned: bool,
) -> None:
    asked: list[object] = []

    def fetch_tree(package: str, version: str, *, lock: Path | None) -> Path:
        asked.extend((package, version, bool(lock)))
        return Path("/cache")

    monkeypatch.setattr(pi._bundles, "fetch_tree", fetch_tree)
    monkeypatch.setattr(pi._bundles, "node", lambda oldest: Path(f"/node{asked.append(oldest)}"))
    pi.fetch(version)
    assert asked == [package, version, pinned, oldest_node]
    argv = (await started(version=version))["argv"]
    assert f"/opt/swerl/agents/pi/node_modules/{package}/dist/cli.js" in argv


@pytest.fixture(scope="module")
def harness() -> Harness:
    """The real CLI; skips where it cannot be had."""
    return built("pi")


def bash(command: str) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("", "bash", {"command": command}),))


@pytest.mark.agents
async def test_configuration_of_the_repository_is_not_loaded(harness: Harness) -> None:
    """What AGENTS.md says is read, as the CLI does; code and prompts below .pi are not."""
    spoil = """
    mkdir -p .pi/extensions .pi/skills/s && echo 'Mind the gap.' >AGENTS.md
    echo 'export default () => { throw new Error("loaded") }' >.pi/extensions/bad.ts
    printf -- '---\\nname: s\\ndescription: spoiled\\n---\\n' >.pi/skills/s/SKILL.md
    """
    worked = await work(harness, script=[DONE], before=spoil)
    assert worked.exit.code == 0, worked.exit.log
    system = worked.told[0].new_messages[0]
    assert system.role is Role.SYSTEM
    assert "Mind the gap." in system.text
    assert "spoiled" not in system.text
    assert "loaded" not in worked.exit.log
