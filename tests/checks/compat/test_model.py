"""The lab's model: it finds its place in a conversation, and speaks with the tools on offer."""

from __future__ import annotations

import pytest

from swerl.checks.compat import phrases
from swerl.checks.compat.cases import CASES
from swerl.checks.compat.ear import Ear
from swerl.checks.compat.model import PROMPT, Model, Place
from swerl.core.chat import ChatRequest, Json, Message, Role, Tool, ToolCall
from swerl.core.errors import EngineLostError
from swerl.core.turn import Sampling
from swerl.engines.families import tiny

TASK = Message(Role.USER, PROMPT)
SAMPLING = Sampling(max_new_tokens=10_000)


def tool(name: str, *properties: str) -> Tool:
    known: dict[str, Json] = {key: {"type": "string"} for key in properties}
    return Tool(name, "", {"type": "object", "properties": known})


BASH = tool("bash", "command")


async def ask(
    model: Model, ear: Ear, *messages: Message, tools: tuple[Tool, ...] = (BASH,)
) -> Message:
    """Put a request into tokens as the gateway does, and return what the model says."""
    ids = ear.render(ChatRequest(messages, tools))
    said = await model.generate(ids, SAMPLING, "s")
    parsed = ear.parse(said.ids)
    calls = tuple(ToolCall("c", name, arguments) for name, arguments in parsed.calls)
    return Message(Role.ASSISTANT, parsed.text, parsed.thinking, calls)


def make(case: str) -> tuple[Model, Ear]:
    ear = Ear(tiny.build(None))
    return Model(CASES[case], ear), ear


async def test_the_script_is_played_move_by_move_and_a_repeated_request_gets_the_same() -> None:
    model, ear = make("tools")
    said = [TASK]
    for _ in CASES["tools"].moves["main"]:
        reply = await ask(model, ear, *said)
        assert await ask(model, ear, *said) == reply
        said += [reply, Message(Role.TOOL, "ok", tool_call_id="c")]
    assert model.finished
    assert model.num_needed == 4
    assert len(model.answered) == 8


async def test_a_title_is_no_part_of_the_script() -> None:
    model, ear = make("tools")
    await ask(model, ear, Message(Role.USER, f"Give a title: {PROMPT}"), tools=())
    assert model.answered == [Place("other", 0)]
    assert model.num_needed == 0


async def test_each_errand_is_a_conversation_of_its_own() -> None:
    model, ear = make("sub-agents")
    task = tool("task", "description", "prompt", "subagent_type")
    first = await ask(model, ear, TASK, tools=(BASH, task))
    second = await ask(model, ear, TASK, first, tools=(BASH, task))
    prompts = [str(call.arguments["prompt"]) for call in second.tool_calls]
    assert len(prompts) == 2
    for prompt in prompts:
        await ask(model, ear, Message(Role.USER, prompt))
    assert model.answered[2:] == [Place("errand-1"), Place("errand-2")]


async def test_a_summary_carries_the_place_over_a_compaction() -> None:
    model, ear = make("compaction")
    first = await ask(model, ear, TASK)
    asked = Message(Role.USER, "You are performing a CONTEXT CHECKPOINT COMPACTION.")
    summary = await ask(model, ear, TASK, first, asked, tools=())
    assert not summary.tool_calls
    after = await ask(model, ear, TASK, Message(Role.USER, f"So far: {summary.text}"))
    assert [place.conversation for place in model.answered] == ["main", "summary", "after"]
    assert after.tool_calls


async def test_a_second_compaction_goes_on_where_the_first_left_off() -> None:
    model, ear = make("compaction")
    so_far = Message(Role.USER, "lab-compacted")
    for _ in range(2):
        said = await ask(model, ear, TASK, so_far)
        asked = Message(Role.USER, "Respond with TEXT ONLY.")
        so_far = await ask(model, ear, TASK, so_far, said, asked)
        so_far = Message(Role.USER, so_far.text)
    assert [place for place in model.answered if place.conversation == "after"] == [
        Place("after", 0), Place("after", 1),
    ]  # fmt: skip
    assert model.finished


async def test_a_broken_call_cannot_be_read_as_a_call() -> None:
    model, ear = make("malformed")
    first = await ask(model, ear, TASK)
    ids = ear.render(ChatRequest((TASK, first), (BASH,)))
    said = await model.generate(ids, SAMPLING, "s")
    parsed = ear.parse(said.ids)
    assert parsed.malformed_calls == 1
    assert not parsed.calls


async def test_a_mistake_that_an_agent_hides_from_the_model_is_made_once() -> None:
    model, ear = make("malformed")
    first = await ask(model, ear, TASK)
    await ask(model, ear, TASK, first)
    again = Message(Role.USER, "That was no call.")
    assert (await ask(model, ear, TASK, first, again)).tool_calls
    assert [place.number for place in model.answered] == [0, 1, 2]


async def test_a_lost_engine_comes_back() -> None:
    model, ear = make("lost")
    first = await ask(model, ear, TASK)
    for _ in range(CASES["lost"].num_lost):
        with pytest.raises(EngineLostError):
            await ask(model, ear, TASK, first)
    assert (await ask(model, ear, TASK, first)).tool_calls
    assert model.num_needed == 2


async def test_an_agent_without_a_known_tool_is_told_of() -> None:
    model, ear = make("tools")
    await ask(model, ear, TASK, tools=(tool("look", "path"),))
    assert "runs commands" in model.lacks


def test_what_a_release_does_not_know_is_left_out_of_a_call() -> None:
    errand = phrases.Errand("errand-1", "Look.")
    old = phrases.delegate([tool("Task", "description", "prompt", "subagent_type")], errand)
    new = phrases.delegate([tool("Agent", "prompt", "run_in_background")], errand)
    assert old
    assert new
    assert "run_in_background" not in old.arguments
    assert new.arguments["run_in_background"] is False


def test_a_sub_agent_is_of_a_kind_that_the_release_offers() -> None:
    kinds: Json = {"type": "string", "enum": ["explore", "general-purpose"]}
    offered: dict[str, Json] = {"prompt": {"type": "string"}, "subagent_type": kinds}
    task = Tool("task", "", {"type": "object", "properties": offered})
    said = phrases.delegate((task,), phrases.Errand("errand-1", "go"))
    assert said
    assert said.arguments == {"prompt": "go", "subagent_type": "general-purpose"}
