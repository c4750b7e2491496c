"""Changes that clients make to a replayed history without changing its meaning.

Each function gets a copy of an Anthropic request's body and a random generator, and returns the
body changed. The draws differ between requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, TypeAlias

Body: TypeAlias = dict[str, Any]
Replay: TypeAlias = Callable[[Body, Random], Body]


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
