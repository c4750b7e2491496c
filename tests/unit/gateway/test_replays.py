"""Made-up clients: one row of exact tokens for every change of a history's form.

If a client changes the meaning, its next message begins a branch of its own; every sampled
token is still trained once, after exactly what the engine saw.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import pytest

from swerl.core.chat import Message, Role, ToolCall
from swerl.core.sample import Sample, to_samples
from swerl.gateway.dialects import anthropic
from tests.unit.gateway._fakes import RecordingEngine
from tests.unit.gateway.conftest import conversation_with
from tests.unit.gateway.test_exact_tokens import check_samples

Body: TypeAlias = dict[str, Any]
Replay: TypeAlias = Callable[[Body, Random], Body]
"""Changes a copy of an Anthropic request's body; the draws differ between requests."""
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


# Changes that clients make to a replayed history without changing its meaning.


def blocks(body: Body, *kinds: str) -> Iterator[dict[str, Any]]:
    for message in body["messages"]:
        if isinstance(message["content"], list):
            yield from (block for block in message["content"] if block["type"] in kinds)


def json_rewritten(body: Body, random: Random) -> Body:
    """Other white space, escapes outside ASCII, keys in another order."""
    text = json.dumps(body, ensure_ascii=True, indent=random.choice([None, 1]), sort_keys=True)
    rewritten: Body = json.loads(text)
    return rewritten


def arguments_rewritten(body: Body, random: Random) -> Body:
    for block in blocks(body, "tool_use"):
        items = list(block["input"].items())
        random.shuffle(items)
        block["input"] = {key: _other_form(value, random) for key, value in items}
    return body


def _other_form(value: Any, random: Random) -> Any:
    if isinstance(value, str) and value.isdigit():
        return random.choice([int(value), float(value), value.lstrip("0") or "0"])
    return value


def arguments_lost(body: Body, random: Random) -> Body:
    """Arguments removed, as by a schema without them; only the call's id is left."""
    for block in blocks(body, "tool_use"):
        block["input"] = {}
    return body


def thinking_moved_or_dropped(body: Body, random: Random) -> Body:
    for message in body["messages"]:
        if message["role"] != "assistant" or isinstance(message["content"], str):
            continue
        thoughts = [block for block in message["content"] if block["type"] == "thinking"]
        rest = [block for block in message["content"] if block["type"] != "thinking"]
        hidden = [{"type": "redacted_thinking", "data": "AAAA"}]
        ways = [thoughts + rest, rest + thoughts, rest, hidden + rest]
        message["content"] = random.choice(ways if rest else ways[:1])
    return body


def signatures_dropped(body: Body, random: Random) -> Body:
    for block in blocks(body, "thinking"):
        block["signature"] = random.choice(["", "EqoB"])
    return body


def cache_markers_moved(body: Body, random: Random) -> Body:
    for block in blocks(body, "text", "tool_use", "tool_result"):
        block.pop("cache_control", None)
        if random.random() < 0.2:
            block["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    return body


def texts_split(body: Body, random: Random) -> Body:
    """Split a block of text at any place, with blank blocks between."""
    for message in body["messages"]:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        message["content"] = [
            part for block in message["content"] for part in _split(block, random)
        ]
    return body


def _split(block: dict[str, Any], random: Random) -> list[dict[str, Any]]:
    if block["type"] == "tool_result" and isinstance(block["content"], str):
        halves = _split({"type": "text", "text": block["content"]}, random)
        return [{**block, "content": halves}]
    if block["type"] != "text":
        return [block]
    place = random.randrange(len(block["text"]) + 1)
    return [{**block, "text": text} for text in (block["text"][:place], block["text"][place:])]


def texts_merged(body: Body, random: Random) -> Body:
    for message in body["messages"]:
        content: list[dict[str, Any]] = []
        for block in message["content"] if isinstance(message["content"], list) else ():
            if content and block["type"] == content[-1]["type"] == "text":
                content[-1]["text"] += random.choice(["", "\n", "\n\n"]) + block["text"]
            else:
                content.append(block)
        if len(content) == 1 and content[0]["type"] == "text":
            message["content"] = content[0]["text"]
        elif content:
            message["content"] = content
    return body


def spaces_changed(body: Body, random: Random) -> Body:
    for block in blocks(body, "text"):
        ends = random.choice(["", " ", "\n", "\r\n", "\u00a0"])
        block["text"] = block["text"].strip() + ends
        if random.random() < 0.5:
            block["text"] = block["text"].replace("\n", "\r\n")
    for block in blocks(body, "tool_result"):
        if isinstance(block["content"], str):
            block["content"] = block["content"].rstrip() + random.choice(["", "\n"])
    return body


def messages_cut_anew(body: Body, random: Random) -> Body:
    """Split a user message into several, with results first or last."""
    messages = []
    for message in body["messages"]:
        if message["role"] != "user" or isinstance(message["content"], str):
            messages.append(message)
            continue
        results = [block for block in message["content"] if block["type"] == "tool_result"]
        rest = [block for block in message["content"] if block["type"] != "tool_result"]
        random.shuffle(results)
        parts = [[block] for block in results] + ([rest] if rest else [])
        if random.random() < 0.5:
            parts = [results + rest]
        messages += [{**message, "content": part} for part in parts]
    return {**body, "messages": messages}


def system_in_another_form(body: Body, random: Random) -> Body:
    text = body["system"]
    place = random.randrange(len(text))
    halves = [{"type": "text", "text": half} for half in (text[:place], text[place:])]
    return {**body, "system": random.choice([text, halves, text + "\n"])}


def tools_in_another_order(body: Body, random: Random) -> Body:
    return {**body, "tools": random.sample(body["tools"], len(body["tools"]))}


def ids_of_its_own(body: Body, random: Random) -> Body:
    """New call ids in each request."""
    names: dict[str, str] = {}
    for kind, key in (("tool_use", "id"), ("tool_result", "tool_use_id")):
        for block in blocks(body, kind):
            names.setdefault(block[key], f"own_{random.randrange(10**9)}_{len(names)}")
            block[key] = names[block[key]]
    return body


def settings_changed(body: Body, random: Random) -> Body:
    more = {"temperature": random.random(), "metadata": {"user_id": str(random.random())}}
    return {**body, **more, "max_tokens": random.randrange(1000, 2000), "model": "another"}


HARMLESS: tuple[Replay, ...] = (
    json_rewritten,
    arguments_rewritten,
    arguments_lost,
    thinking_moved_or_dropped,
    signatures_dropped,
    cache_markers_moved,
    texts_split,
    texts_merged,
    spaces_changed,
    messages_cut_anew,
    system_in_another_form,
    tools_in_another_order,
    ids_of_its_own,
    settings_changed,
)


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
