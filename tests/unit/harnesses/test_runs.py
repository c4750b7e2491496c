"""Whole runs of real CLIs: summaries, sub-agents, cut replies, a repository's own settings.

Those of Claude Code are in `test_claude_code_runs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swerl.core.chat import Finish, Message, Role, ToolCall
from swerl.gateway.limits import SessionLimits

from .brains import FIX, LEAD, Heard, Line, Model, Shell, call, delegate, forgetting, leading, say
from .helpers import built, task, work

pytestmark = pytest.mark.agents
FEW_TURNS = SessionLimits(max_context_tokens=2**20, max_turns=20)


def exec_command(command: str) -> ToolCall:
    return call("exec_command", cmd=command)


async def test_a_history_that_grows_is_put_into_a_summary() -> None:
    model = Model(forgetting(exec_command))
    worked = await work(built("codex", compact_at=9000), model=model, limits=FEW_TURNS)
    worked.assert_solved()
    # the summary is asked for without tools, so its prompt has a beginning of its own
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)
    assert max(len(prompt) for prompt, _ in model.calls) < 20_000


async def test_a_reply_cut_short_is_sampled_once_and_ends_the_run() -> None:
    script = [say("word " * 400), say("", exec_command(FIX))]
    worked = await work(built("codex"), script=script, max_new_tokens=600)
    assert worked.exit.limit, worked.exit.log[-2000:]
    assert [turn.finish for turn in worked.trajectory.turns] == [Finish.LENGTH]
    worked.assert_trained_whole()


def bash(command: str) -> ToolCall:
    return call("bash", command=command, description="Work")


def shell(command: str) -> ToolCall:
    return call("run_shell_command", command=command, is_background=False)


def hand_out(prompt: str) -> ToolCall:
    return call("task", description="A part", prompt=prompt, subagent_type="general")


OPENCODE_FIX = [say("", bash(FIX)), say("Done.")]
QWEN_FIX = [
    say("", call("read_file", file_path="/repo/calc.py")),
    say("", call("edit", file_path="/repo/calc.py", old_string="a - b", new_string="a + b")),
    say("Done."),
]
"""The CLI lets no file be changed that was not read."""


@pytest.mark.parametrize(
    ("name", "both", "shell", "fix"),
    [
        ("opencode", [hand_out("Part A."), hand_out("Part B.")], bash, OPENCODE_FIX),
        (
            "qwen-code",
            [delegate("Part A.", "agent"), delegate("Part B.", "agent")],
            shell,
            QWEN_FIX,
        ),
    ],
)
async def test_sub_agents_work_each_in_a_branch_of_its_own(
    name: str, both: Sequence[ToolCall], shell: Shell, fix: Sequence[Message]
) -> None:
    def lead(heard: Heard) -> Line:
        return [say("Two parts.", *both), *fix][heard.num_replies]

    model = Model(leading(lead, shell), delay_s=0.1)
    worked = await work(built(name), task=task(LEAD), model=model)
    worked.assert_solved()
    for part in ("part1", "part2"):
        assert any(f"Report of {part}." in text for text in worked.results)
    assert (b"cat part1.txt" in worked.exit.records) == (name == "qwen-code")
    worked.assert_trained_whole(num_samples=3)
    model.assert_trained_exactly(worked.samples)


SPOILS = {
    "opencode": """
    echo '{"model": "other/model", "instructions": ["more.md"]}' >opencode.json
    echo 'Spoiled.' >more.md
    """,
    "pi": """
    mkdir -p .pi/extensions .pi/skills/s
    echo 'export default () => { throw new Error("Spoiled.") }' >.pi/extensions/bad.ts
    printf -- '---\\nname: s\\ndescription: Spoiled.\\n---\\n' >.pi/skills/s/SKILL.md
    """,
}


@pytest.mark.parametrize("name", SPOILS)
async def test_configuration_of_the_repository_is_not_loaded(name: str) -> None:
    """What AGENTS.md says is read, as the CLIs do; what would configure them is not."""
    before = f"echo 'Mind the gap.' >AGENTS.md\n{SPOILS[name]}"
    worked = await work(built(name), script=[say("Done.")], before=before)
    assert worked.exit.code == 0, worked.exit.log
    system = worked.told[0].new_messages[0]
    assert system.role is Role.SYSTEM
    assert "Mind the gap." in system.text
    assert "Spoiled." not in system.text + worked.exit.log
