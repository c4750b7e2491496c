"""The scripted model finds its position in a conversation, and uses the tools on offer."""

from __future__ import annotations

import pytest

from swerl.core.chat import ChatRequest, Json, Message, Role, Tool, ToolCall
from swerl.core.errors import EngineLostError
from swerl.core.turn import Sampling
from swerl.engines.families import tiny
from tests.compat.cases import CASES
from tests.compat.model import (
    PROMPT,
    Position,
    RecordingFamily,
    ScriptedModel,
    Subtask,
    delegate_call,
)

TASK = Message(Role.USER, PROMPT)
SAMPLING = Sampling(max_new_tokens=10_000)


def tool(name: str, *properties: str) -> Tool:
    known: dict[str, Json] = {key: {"type": "string"} for key in properties}
    return Tool(name, "", {"type": "object", "properties": known})


BASH = tool("bash", "command")


async def ask(
    model: ScriptedModel,
    family: RecordingFamily,
    *messages: Message,
    tools: tuple[Tool, ...] = (BASH,),
) -> Message:
    """Put a request into tokens as the gateway does, and return what the model says."""
    ids = family.render(ChatRequest(messages, tools))
    said = await model.generate(ids, SAMPLING, "s")
    parsed = family.parse(said.ids)
    calls = tuple(ToolCall("c", name, arguments) for name, arguments in parsed.calls)
    return Message(Role.ASSISTANT, parsed.text, parsed.thinking, calls)


def make(case: str) -> tuple[ScriptedModel, RecordingFamily]:
    family = RecordingFamily(tiny.build(None))
    return ScriptedModel(CASES[case], family), family


async def test_the_script_is_played_move_by_move_and_a_repeated_request_gets_the_same() -> None:
    model, family = make("tools")
    said = [TASK]
    for _ in CASES["tools"].moves["main"]:
        reply = await ask(model, family, *said)
        assert await ask(model, family, *said) == reply
        said += [reply, Message(Role.TOOL, "ok", tool_call_id="c")]
    assert model.finished
    assert model.num_needed == 4
    assert len(model.answered) == 8


async def test_a_title_is_no_part_of_the_script() -> None:
    model, family = make("tools")
    await ask(model, family, Message(Role.USER, f"Give a title: {PROMPT}"), tools=())
    assert model.answered == [Position("other", 0)]
    assert model.num_needed == 0


async def test_each_subtask_is_its_own_conversation() -> None:
    model, family = make("sub-agents")
    task = tool("task", "description", "prompt", "subagent_type")
    first = await ask(model, family, TASK, tools=(BASH, task))
    second = await ask(model, family, TASK, first, tools=(BASH, task))
    prompts = [str(call.arguments["prompt"]) for call in second.tool_calls]
    assert len(prompts) == 2
    for prompt in prompts:
        await ask(model, family, Message(Role.USER, prompt))
    assert model.answered[2:] == [Position("subtask-1"), Position("subtask-2")]


async def test_a_summary_carries_the_position_over_a_compaction() -> None:
    model, family = make("compaction")
    first = await ask(model, family, TASK)
    asked = Message(Role.USER, "You are performing a CONTEXT CHECKPOINT COMPACTION.")
    summary = await ask(model, family, TASK, first, asked, tools=())
    assert not summary.tool_calls
    after = await ask(model, family, TASK, Message(Role.USER, f"So far: {summary.text}"))
    assert [position.conversation for position in model.answered] == ["main", "summary", "after"]
    assert after.tool_calls


async def test_a_second_compaction_continues_after_the_first() -> None:
    model, family = make("compaction")
    so_far = Message(Role.USER, "compat-compacted")
    for _ in range(2):
        said = await ask(model, family, TASK, so_far)
        asked = Message(Role.USER, "Respond with TEXT ONLY.")
        so_far = await ask(model, family, TASK, so_far, said, asked)
        so_far = Message(Role.USER, so_far.text)
    assert [position for position in model.answered if position.conversation == "after"] == [
        Position("after", 0), Position("after", 1),
    ]  # fmt: skip
    assert model.finished


async def test_a_broken_call_cannot_be_read_as_a_call() -> None:
    model, family = make("malformed")
    first = await ask(model, family, TASK)
    ids = family.render(ChatRequest((TASK, first), (BASH,)))
    said = await model.generate(ids, SAMPLING, "s")
    parsed = family.parse(said.ids)
    assert parsed.malformed_calls == 1
    assert not parsed.calls


async def test_a_mistake_that_an_agent_hides_from_the_model_is_made_once() -> None:
    model, family = make("malformed")
    first = await ask(model, family, TASK)
    await ask(model, family, TASK, first)
    again = Message(Role.USER, "That was no call.")
    assert (await ask(model, family, TASK, first, again)).tool_calls
    assert [position.number for position in model.answered] == [0, 1, 2]


async def test_a_lost_engine_comes_back() -> None:
    model, family = make("lost")
    first = await ask(model, family, TASK)
    for _ in range(CASES["lost"].num_lost):
        with pytest.raises(EngineLostError):
            await ask(model, family, TASK, first)
    assert (await ask(model, family, TASK, first)).tool_calls
    assert model.num_needed == 2


async def test_an_agent_without_a_known_tool_is_reported() -> None:
    model, family = make("tools")
    await ask(model, family, TASK, tools=(tool("look", "path"),))
    assert "runs commands" in model.lacks


def test_arguments_unknown_to_a_release_are_left_out() -> None:
    subtask = Subtask("subtask-1", "Look.")
    old = delegate_call([tool("Task", "description", "prompt", "subagent_type")], subtask)
    new = delegate_call([tool("Agent", "prompt", "run_in_background")], subtask)
    assert old
    assert new
    assert "run_in_background" not in old.arguments
    assert new.arguments["run_in_background"] is False


def test_a_sub_agent_is_of_a_kind_that_the_release_offers() -> None:
    kinds: Json = {"type": "string", "enum": ["explore", "general-purpose"]}
    offered: dict[str, Json] = {"prompt": {"type": "string"}, "subagent_type": kinds}
    task = Tool("task", "", {"type": "object", "properties": offered})
    said = delegate_call((task,), Subtask("subtask-1", "go"))
    assert said
    assert said.arguments == {"prompt": "go", "subagent_type": "general-purpose"}
