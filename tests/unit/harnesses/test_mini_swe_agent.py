"""mini-swe-agent: its own prompts and formats, its limits, and a sandbox left as the image is."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.core.chat import Message
from swerl.core.errors import ImageError, InputError
from swerl.harnesses import mini_swe_agent
from swerl.harnesses._cli import call
from swerl.harnesses.mini_swe_agent import MiniSweAgent, Options

from .helpers import TASK, WORKDIR, Worked, built, work

pytestmark = pytest.mark.agents

SUBMIT = mini_swe_agent._SUBMIT


@pytest.fixture(scope="module")
def harness() -> MiniSweAgent:
    agent = built("mini-swe-agent")
    assert isinstance(agent, MiniSweAgent)
    return agent


def say(*commands: str) -> list[Message]:
    """Return replies with one command each."""
    return [call("bash", command=command) for command in commands]


async def told(harness: MiniSweAgent, *commands: str) -> Worked:
    return await work(harness, script=say(*commands, SUBMIT))


def settings_file(harness: MiniSweAgent, name: str) -> str:
    return (harness.bundle[0].source / "minisweagent" / "config" / name).read_text()


async def test_the_first_request_is_the_agents_own_prompt_with_the_tasks_folder(
    harness: MiniSweAgent,
) -> None:
    worked = await told(harness)
    system, user = worked.told[0].new_messages
    text = settings_file(harness, "benchmarks/swebench.yaml")
    block = text.partition("instance_template: |\n")[2].partition("\n  step_limit")[0]
    template = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    assert user.text == template.replace("{{task}}", TASK.prompt).replace("/testbed", WORKDIR)
    assert system.text.startswith("You are a helpful assistant that can interact with a computer")


async def test_a_result_has_the_form_of_the_agents_settings(harness: MiniSweAgent) -> None:
    worked = await told(harness, "echo out; echo err >&2; exit 3", "seq 3000")
    short, long = worked.results[:2]
    assert short == "<returncode>3</returncode>\n<output>\nout\nerr\n</output>"
    assert "<elided_chars>\n3893 characters elided\n</elided_chars>" in long


async def test_commands_see_the_images_environment_and_not_the_agents(
    harness: MiniSweAgent,
) -> None:
    worked = await work(harness, script=say("env; cat", SUBMIT), after="env")
    seen, given = (set(text.splitlines()) for text in (worked.results[0], worked.after))
    added = {line.partition("=")[0] for line in seen - given if "=" in line}
    agents_own = {"PAGER", "MANPAGER", "LESS", "PIP_PROGRESS_BAR", "TQDM_DISABLE", "BASH_ENV"}
    assert added - {"SHLVL", "_", "OLDPWD"} <= agents_own
    assert "sk-swerl" not in worked.results[0]


async def test_the_patch_file_that_the_prompt_asks_for_is_no_part_of_the_work(
    harness: MiniSweAgent,
) -> None:
    change = "echo z = 3 >>calc.py; git diff -- calc.py >patch.txt"
    submit = f"{SUBMIT} && cat patch.txt"
    submitted = await work(harness, script=say(change, submit))
    assert "patch.txt" not in submitted.diff
    assert "+z = 3" in submitted.diff
    kept = await work(harness, script=say(f"{change}; echo more >>patch.txt", SUBMIT))
    assert "patch.txt" in kept.diff


async def test_a_command_past_its_time_is_told_and_the_agent_goes_on(harness: MiniSweAgent) -> None:
    agent = MiniSweAgent(Options(tool_timeout_s=1), harness.bundle)
    worked = await told(agent, "echo begun; sleep 987")
    assert "timed out after 1 seconds" in worked.results[0]
    assert "begun" in worked.results[0]
    assert worked.exit.code == 0


def test_an_unknown_release_is_the_users_error() -> None:
    with pytest.raises(InputError, match=r"no mini-swe-agent 0\.0\.1"):
        mini_swe_agent.fetch("0.0.1")


def test_a_wheel_with_another_hash_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, harness: MiniSweAgent
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path))
    monkeypatch.setitem(mini_swe_agent._PINNED, mini_swe_agent.DEFAULT_VERSION, "0" * 64)
    with pytest.raises(ImageError, match="HASH"):
        mini_swe_agent.fetch(mini_swe_agent.DEFAULT_VERSION)
    assert not list(tmp_path.rglob("minisweagent"))
