"""Made-up clients: one row of exact tokens for every change of a history's form.

If a client changes the meaning, its next message begins a branch of its own; every sampled
token is still trained once, after exactly what the engine saw.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from swerl.core.chat import Message, Role, ToolCall
from swerl.core.sample import Sample, to_samples
from swerl.gateway.dialects import anthropic
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import conversation_with
from tests.unit.gateway.replays import HARMLESS, Body, Replay
from tests.unit.gateway.test_exact_tokens import check_samples

DIALECT = anthropic.build()
TOOLS = [
    {
        "name": name,
        "description": f"Runs {name}.",
        "input_schema": {"properties": {"n": {"type": "string"}, "cmd": {"type": "string"}}},
    }
    for name in ("bash", "read", "edit")
]
LINES = ("Fix the café's menu.", "a\n\nb", "  indented", "{}", "日本")


@dataclass
class Talk:
    """One session, its engine, and its client's history."""

    random: Random
    engine: RecordingEngine = field(default_factory=RecordingEngine)
    messages: list[dict[str, Any]] = field(default_factory=list)
    system: str = "Be brief.\nToday is Monday."

    def __post_init__(self) -> None:
        self.conversation = conversation_with(self.engine, max_new_tokens=900)

    async def say(self, *changes: Replay, said: Message | None = None) -> None:
        """Add messages of the user or of tools, and the model's answer."""
        self.messages.append({"role": "user", "content": self._heard()})
        await self.ask(*changes, said=said)

    async def ask(self, *changes: Replay, said: Message | None = None) -> None:
        """Send the history with the client's changes, and record the answer."""
        body: Body = {
            "model": "m",
            "system": self.system,
            "tools": copy.deepcopy(TOOLS),
            "messages": copy.deepcopy(self.messages),
        }
        for change in changes:
            body = change(body, self.random)
        self.engine.lines = [said or self._line()]
        async with self.conversation.answer(DIALECT.parse(body)) as answer:
            reply: Any = DIALECT.reply(await answer.reply())
            answer.delivered()
        self.messages.append({"role": "assistant", "content": reply["content"]})

    async def samples(self) -> list[Sample]:
        """Close the session; assert that each sampled token is trained once, in its place."""
        trajectory = await self.conversation.close()
        samples = to_samples(trajectory, episode="e", task="t")
        num_sampled = sum(len(call.output) for call in self.engine.calls)
        assert check_samples(samples, self.engine.calls) == num_sampled
        return samples

    def assert_packed_once(self, samples: list[Sample]) -> None:
        assert len(samples) == 1
        last = self.engine.calls[-1]
        assert tuple(samples[0].ids) == last.prompt + last.output

    def _heard(self) -> list[dict[str, Any]]:
        blocks = self.messages[-1]["content"] if self.messages else []
        new: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": self._text()}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        if not new or self.random.random() < 0.3:
            new += [{"type": "text", "text": self._text()} for _ in range(2)]
        return new

    def _line(self) -> Message:
        calls = tuple(
            ToolCall("", "bash", {"n": f"0{self.random.randrange(99)}", "cmd": self._text()})
            for _ in range(self.random.choice([0, 1, 1, 3]))
        )
        return Message(Role.ASSISTANT, f"{self._text()} {len(self.engine.calls)}", "Hm.", calls)

    def _text(self) -> str:
        return self.random.choice(LINES)


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.__name__)
async def test_a_change_of_form_keeps_one_row(change: Replay) -> None:
    one = Talk(Random(1))
    for _ in range(12):
        await one.say(change)
    one.assert_packed_once(await one.samples())


async def test_a_reply_to_a_prefilled_beginning_may_be_sent_as_one_with_it() -> None:
    for calls in ((), (ToolCall("", "bash", {"cmd": "ls"}),)):
        one = Talk(Random(1))
        await one.say()
        one.messages += [{"role": "user", "content": "As JSON."}]
        one.messages += [{"role": "assistant", "content": "{"}]
        await one.ask(said=Message(Role.ASSISTANT, '"a": 1}', "", calls))
        begun, whole = one.messages[-2:]
        whole["content"] = [{"type": "text", "text": begun["content"]}, *whole["content"]]
        del one.messages[-2]
        await one.say()
        one.assert_packed_once(await one.samples())


def _system(body: Body, random: Random) -> Body:
    return {**body, "system": body["system"].replace("Monday", "Tuesday")}


def _tool_added(body: Body, random: Random) -> Body:
    return {**body, "tools": [*body["tools"], {"name": "mcp", "input_schema": {}}]}


def _tool_described_anew(body: Body, random: Random) -> Body:
    tools = [{**tool, "description": "Another one."} for tool in body["tools"]]
    return {**body, "tools": tools}


def _results_cleared(body: Body, random: Random) -> Body:
    results = [b for m in body["messages"] for b in m["content"] if b["type"] == "tool_result"]
    for block in results[:-1]:
        block["content"] = "[cleared]"
    return body


def _said_twice(body: Body, random: Random) -> Body:
    return {**body, "messages": [body["messages"][0], *body["messages"]]}


def _image(body: Body, random: Random) -> Body:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    first = {**body["messages"][0], "content": [*body["messages"][0]["content"], image]}
    return {**body, "messages": [first, *body["messages"][1:]]}


@pytest.mark.parametrize(
    "change",
    [_system, _tool_added, _tool_described_anew, _results_cleared, _said_twice, _image],
    ids=lambda change: change.__name__.strip("_"),
)
async def test_a_change_of_meaning_begins_a_branch_and_loses_nothing(change: Replay) -> None:
    one = Talk(Random(1))
    call = Message(Role.ASSISTANT, "", "", (ToolCall("", "bash", {"cmd": "ls"}),))
    for number in range(8):
        await one.say(*((change,) if number >= 4 else ()), said=call)
    samples = await one.samples()
    # clearing goes on with each turn, the others happen once
    assert len(samples) == (5 if change is _results_cleared else 2)
