"""What every agent must do: whole runs of the real program through the gateway.

A new agent joins with one entry in `agents.py`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swerl.core import plugins
from swerl.core.changes import FileEdit, edits
from swerl.core.chat import Message, Role, ToolCall
from swerl.core.contracts import Harness, Sandbox
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Exec, Mount
from swerl.core.turn import Completion, Sampling
from swerl.engines.scripted import ScriptedEngine
from swerl.gateway.limits import SessionLimits
from swerl.gateway.server import Gateway

from .agents import AGENTS, Agent
from .helpers import PATCH, ROOMY, SOLVED, WORKDIR, Worked, built, locally, task, work

CHANGED = ["calc.py", "it's new.py"]
"""The files of PATCH."""
LEFT = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
"""Shell script that prints the command lines of all processes."""
KEYS_SEEN = "echo keys=$(cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c 'sk-swer[l]-')"
"""Shell script that counts session keys on command lines, which every user may read."""
KEY_FILES = """
grep -rlsF sk-swerl- "$HOME" /tmp /var/tmp /dev/shm . | while read -r file; do
  stat -c '%a %n' "$file"
done
"""
"""Shell script that lists files with a session key in them, and who may read each."""


TRACED = ["strace", "-f", "-A", "-o", "/tmp/trace", "-e", "trace=connect,sendto,sendmsg,sendmmsg"]
LOOK_UP = """
echo 'nameserver 127.0.0.1' >/etc/resolv.conf
echo 'hosts: files dns' >/etc/nsswitch.conf
"""


NEWEST = pytest.mark.parametrize(
    "agent", [each.param(at_night=True) for each in AGENTS], indirect=True
)
"""Repeats with older releases of an agent at night only."""


class Traced:
    """A sandbox in which every call that could reach somebody is written down."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def run(self, argv: Sequence[str], **options: Any) -> Exec:
        return await self._sandbox.run([*TRACED, *argv], **options)


@asynccontextmanager
async def traced(gateway: Gateway, mounts: Sequence[Mount]) -> AsyncIterator[Sandbox]:
    """Open a local sandbox that writes down whom its programs call. A Place.

    Names are looked up at a server on the spot that is not there: look-ups are calls, too.
    """
    async with locally(gateway, mounts) as sandbox:
        done = await sandbox.run(["sh", "-ec", LOOK_UP], user="root")
        assert done.exit_code == 0, done
        yield Traced(sandbox)  # type: ignore[misc]


@pytest.fixture(scope="module", params=[agent.param() for agent in AGENTS])
def agent(request: pytest.FixtureRequest) -> Agent:
    """One agent of the table."""
    known: Agent = request.param
    return known


@pytest.fixture(scope="module")
def harness(agent: Agent) -> Harness:
    """The agent itself; skips where its bundle cannot be had."""
    return built(agent.name, **agent.options)


def side_by_side(left: Sequence[Message], right: Sequence[Message]) -> list[Message]:
    """Return replies that make the calls of two scripts of equal length at once."""
    return [
        Message(Role.ASSISTANT, one.text, tool_calls=one.tool_calls + other.tool_calls)
        for one, other in zip(left, right, strict=True)
    ]


def changed(worked: Worked) -> list[str]:
    """Return the files that the agent changed or added."""
    lines = worked.diff.splitlines()
    return [line.partition(" b/")[2].strip('"') for line in lines if line.startswith("diff --git")]


async def test_the_gold_edit_is_made_and_every_sampled_token_is_trained(harness: Harness) -> None:
    worked = await work(harness)
    assert worked.exit.code == 0, worked.exit.log
    assert not worked.exit.timed_out
    assert not worked.exit.limit
    assert worked.calc == SOLVED
    assert changed(worked) == CHANGED
    assert "+y = '1'\n" in worked.diff
    worked.assert_trained_whole()


class Slow(ScriptedEngine):
    """Takes its time for a reply, in which an agent may send side requests."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, session: str) -> Completion:
        await asyncio.sleep(0.3)
        return await super().generate(ids, sampling, session)


@NEWEST
async def test_no_request_is_made_that_the_script_does_not_answer(harness: Harness) -> None:
    worked = await work(harness, engine=Slow)
    assert len(worked.trajectory.turns) == len(harness.script(edits(PATCH), WORKDIR))


@NEWEST
async def test_calls_of_one_reply_are_all_done(harness: Harness) -> None:
    parts = ([FileEdit(f"{name}.py", "", f"{name} = 1\n")] for name in ("a", "b"))
    worked = await work(
        harness, script=side_by_side(*(harness.script(part, WORKDIR) for part in parts))
    )
    assert worked.exit.code == 0, worked.exit.log
    assert changed(worked) == ["a.py", "b.py"]
    worked.assert_trained_whole()


@NEWEST
@pytest.mark.parametrize("wrong", ["unknown tool", "missing argument"])
async def test_a_call_that_cannot_be_done_is_recovered_from(
    harness: Harness, agent: Agent, wrong: str
) -> None:
    name = agent.shell("").name if wrong == "missing argument" else "no_such_tool"
    broken = Message(Role.ASSISTANT, tool_calls=(ToolCall("", name, {}),))
    script = [broken, *harness.script(edits(PATCH), WORKDIR)]
    worked = await work(harness, script=script)
    assert worked.exit.code == 0, worked.exit.log
    assert worked.calc == SOLVED
    worked.assert_trained_whole(num_samples=2 if agent.drops_malformed else 1)


async def test_the_budget_ends_the_agent_with_all_that_it_started_and_keeps_what_it_told(
    harness: Harness, agent: Agent
) -> None:
    endless = "echo kept >kept.txt; setsid sleep 9871 & sleep 9872 & sleep 9873"
    script = [agent.say("echo mark-$((40 + 2))"), agent.say(endless)]
    for budget_s in (agent.start_s, 3 * agent.start_s, 9 * agent.start_s):
        worked = await work(harness, script=script, budget_s=budget_s, after=LEFT)
        assert worked.exit.timed_out
        if "+kept\n" in worked.diff:  # on a busy machine it may not come that far
            break
    assert "+kept\n" in worked.diff
    assert "sleep 987" not in worked.after
    assert "/opt/swerl/agents" not in worked.after
    assert "mark-42" in worked.exit.log
    assert (b"mark-42" in worked.exit.records) == agent.keeps_records


@NEWEST
async def test_the_gateways_turn_limit_ends_the_agent_and_keeps_its_work(
    harness: Harness, agent: Agent
) -> None:
    limits = SessionLimits(max_context_tokens=2**20, max_turns=1)
    script = [agent.say("echo kept >kept.txt")] * 5
    worked = await work(harness, script=script, limits=limits)
    assert not worked.exit.timed_out
    assert len(worked.trajectory.turns) == 1
    assert changed(worked) == ["kept.txt"]


@NEWEST
async def test_a_full_context_ends_the_agent_without_a_turn(harness: Harness) -> None:
    worked = await work(harness, limits=SessionLimits(max_context_tokens=2))
    assert not worked.exit.timed_out
    assert not worked.trajectory.turns


@NEWEST
@pytest.mark.parametrize(
    "prompt",
    ["/etc is wrong.", "-h $(touch x) `touch y` \"'\\", "é漢🙂\t" * 10_000 + "end"],
    ids=["slash", "dash and quotes", "100 kB of Unicode"],
)
async def test_the_prompt_reaches_the_model_as_it_is(harness: Harness, prompt: str) -> None:
    worked = await work(harness, task=task(prompt), limits=ROOMY)
    assert worked.exit.code == 0, worked.exit.log
    assert any(prompt in message.text for message in worked.told[0].new_messages)
    assert changed(worked) == CHANGED


async def test_the_session_key_is_hidden_from_other_users(harness: Harness, agent: Agent) -> None:
    script = [agent.say(KEYS_SEEN), *harness.script([], WORKDIR)]
    worked = await work(harness, script=script, after=KEY_FILES)
    assert worked.exit.code == 0, worked.exit.log
    assert re.findall(r"keys=(\d+)", worked.results[0]) == ["0"]
    readable = [line for line in worked.after.splitlines() if int(line.split()[0], 8) & 0o044]
    assert not readable


@NEWEST
async def test_nobody_but_the_gateway_is_called(harness: Harness) -> None:
    if not harness.inside:
        pytest.skip("it does not live in the sandbox")
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    worked = await work(harness, place=traced, after="cat /tmp/trace")
    assert worked.calc == SOLVED, worked.exit.log
    called = re.findall(r'sin6?_port=htons\((\d+)\).*?"([^"]+)"', worked.after)
    assert called
    assert not [(host, port) for port, host in called if host != "127.0.0.1" or port == "53"]


@NEWEST
async def test_a_home_that_cannot_be_written_is_an_error_with_a_hint(
    harness: Harness, agent: Agent
) -> None:
    spoil = 'cd / && rm -rf "$HOME" && touch "$HOME"'
    if not agent.needs_home:
        worked = await work(harness, before=spoil)
        assert worked.calc == SOLVED
        return
    with pytest.raises(SandboxError, match=r"(?i)home") as caught:
        await work(harness, before=spoil)
    assert caught.value.hint


def test_every_agent_of_swerl_is_judged() -> None:
    assert {agent.name for agent in AGENTS} == set(plugins.names("harnesses"))
