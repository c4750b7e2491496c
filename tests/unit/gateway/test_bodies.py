"""Bodies: a request that repeats an earlier one is read as if it came alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

import orjson
import pytest

from swerl.core.contracts import Dialect
from swerl.core.errors import GatewayError
from swerl.gateway import bodies
from swerl.gateway.bodies import Replays
from swerl.gateway.dialects import anthropic, openai_chat, openai_responses

TEXTS = ("", "fix it", 'say "no"', "a\\b\n\u2028é", '],"tools":[', '{"role":"assistant"}', "]}")
CALL_ID, NAME = "call_1", "bash"


def anthropic_items(random: Random, turn: int) -> list[Any]:
    text: Any = {"type": "text", "text": random.choice(TEXTS)}
    calls = [
        {
            "type": "tool_use",
            "id": f"c{turn}_{n}",
            "name": NAME,
            "input": {"cmd": random.choice(TEXTS)},
        }
        for n in range(random.choice([0, 1, 1, 2]))
    ]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": random.choice(TEXTS)}
        for call in calls
    ]
    asked: Any = {"role": "user", "content": results or random.choice([[text], text["text"], []])}
    return [{"role": "assistant", "content": [text, *calls]}, asked]


def chat_items(random: Random, turn: int) -> list[Any]:
    calls = [
        {"id": f"c{turn}_{n}", "type": "function", "function": {"name": NAME, "arguments": "{}"}}
        for n in range(random.choice([0, 1, 1, 2]))
    ]
    reply: Any = {"role": "assistant", "content": random.choice(TEXTS), "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": random.choice(TEXTS)}
        for call in calls
    ]
    return [reply, *(results or [{"role": "user", "content": random.choice(TEXTS)}])]


def responses_items(random: Random, turn: int) -> list[Any]:
    thought: Any = {"type": "reasoning", "summary": [], "content": []}
    said: Any = {"type": "message", "role": "assistant", "content": random.choice(TEXTS)}
    call = {"type": "function_call", "call_id": f"c{turn}", "name": NAME, "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": f"c{turn}", "output": "ok"}
    foreign = {"type": "web_search_call", "status": "completed"}
    reply = [one for one in (thought, said, foreign) if random.random() < 0.4]
    if random.random() < 0.7:
        return [*reply, call, result]
    return [*reply, {"role": "user", "content": random.choice(TEXTS)}]


KINDS: dict[str, tuple[Dialect, str, Callable[[Random, int], list[Any]]]] = {
    "anthropic": (anthropic.build(), "messages", anthropic_items),
    "chat": (openai_chat.build(), "messages", chat_items),
    "responses": (openai_responses.build(), "input", responses_items),
}
TOOLS: dict[str, Any] = {
    "anthropic": {"name": NAME, "input_schema": {"type": "object"}},
    "chat": {"type": "function", "function": {"name": NAME}},
    "responses": {"type": "function", "name": NAME},
}


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except GatewayError as error:
        return str(error)


def written(random: Random, kind: str, items: list[Any]) -> bytes:
    """A client's body: cache markers move with the last message, other fields change at times."""
    items = copy.deepcopy(items)
    if kind == "anthropic" and isinstance(items[-1]["content"], list) and items[-1]["content"]:
        items[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    system = random.choice(["be brief"] * 9 + ["be long"])
    fields: dict[str, Any] = {"model": "m", "max_tokens": random.choice([5, 9])}
    after: dict[str, Any] = {"stream": True, "tools": [TOOLS[kind]] * (random.random() < 0.95)}
    (fields if random.random() < 0.9 else after)["system"] = system
    fields["instructions"] = system
    if random.random() < 0.1:
        fields, after = after, fields
    key = KINDS[kind][1]
    body: dict[str, Any] = {**fields, key: items, **after}
    if random.random() < 0.1:
        return json.dumps(body).encode()
    raw = orjson.dumps(body)
    if random.random() < 0.03:
        raw = raw[:-1] + b',"%b":[]}' % key.encode()
    return raw if random.random() < 0.98 else raw[: random.randrange(len(raw))]


def changed(random: Random, items: list[Any]) -> list[Any]:
    """Items after a change that clients or agents make: a fork, a rewrite, a lost result."""
    items = copy.deepcopy(items)
    place = random.randrange(len(items))
    match random.choice(["cut", "drop", "double", "empty", "same", "same", "same", "same"]):
        case "cut" if place:
            del items[place:]
        case "drop" if len(items) > 1:
            del items[place]
        case "double":
            items.insert(place, items[place])
        case "empty":
            items[place] = {**items[place], "content": "other"}
    return items


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_repeated_beginning_changes_nothing(kind: str, seed: int) -> None:
    random = Random(seed)
    dialect, _, more = KINDS[kind]
    replays = Replays()
    items: list[Any] = [{"role": "user", "content": "fix it"}]
    for turn in range(30):
        raw = bytearray(written(random, kind, items))

        def alone(raw: bytearray = raw) -> Any:
            return dialect.parse(bodies.read_object(raw, "", len(raw)))

        def repeated(raw: bytearray = raw, alone: Callable[[], Any] = alone) -> Any:
            if known := replays.read(dialect, raw):
                return known
            return replays.keep(dialect, bodies.read_object(raw, "", len(raw)), raw) or alone()

        assert outcome(repeated) == outcome(alone)
        items = changed(random, items) if random.random() < 0.1 else items
        items += more(random, turn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools_come", ["first", "last"])
def test_a_body_costs_what_is_new_in_it(
    kind: str, tools_come: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(0)
    dialect, key, more = KINDS[kind]
    replays, parsed = Replays(), list[int]()
    items: list[Any] = [{"role": "user", "content": "fix it"}]
    parse = dialect.parse

    def counted(body: Any) -> Any:
        parsed.append(len(body[key]))
        return parse(body)

    monkeypatch.setattr(dialect, "parse", counted, raising=False)
    for turn in range(50):
        tools = {"tools": [TOOLS[kind]]}
        first, last = (tools, {}) if tools_come == "first" else ({}, tools)
        raw = bytearray(orjson.dumps({"model": "m", **first, key: items, **last}))
        known = replays.read(dialect, raw)
        known or replays.keep(dialect, orjson.loads(raw), raw)
        items += more(random, turn)

    # Some blank messages of a client leave two replies side by side, which are read together.
    assert sorted(parsed)[len(parsed) * 8 // 10] < 20
    assert len(items) > 80


def test_the_values_of_a_repeated_beginning_count(monkeypatch: pytest.MonkeyPatch) -> None:
    random, replays = Random(0), Replays()
    dialect, _, more = KINDS["chat"]
    items: list[Any] = [{"role": "user", "content": "fix it"}]
    raws = []
    for turn in range(100):
        items += more(random, turn)
        raws.append(bytearray(orjson.dumps({"model": "m", "messages": items})))
    assert replays.keep(dialect, orjson.loads(raws[-2]), raws[-2])
    num_values = bodies.count_values(orjson.loads(raws[-1]), most=10**6)

    monkeypatch.setattr(bodies, "MOST_VALUES", num_values + 5)
    assert replays.read(dialect, raws[-1])
    monkeypatch.setattr(bodies, "MOST_VALUES", num_values - 5)
    assert replays.read(dialect, raws[-1]) is None
