"""Reading the parts of an Anthropic Messages request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from swerl.chat import Json, Message, Role, Tool, ToolCall
from swerl.dialects._wire import checked, optional, refuse, required, shown

_BILLING = "x-anthropic-billing-header"
"""Claude Code's first system block can carry a stamp that changes with each request."""
_JOINT = "\n"
"""Between the text blocks of one message."""


def read_system(system: Json) -> Iterator[Message]:
    """Yield the system prompt, given as a text or as a list of text blocks."""
    if system is None:
        return
    blocks = [system] if isinstance(system, str) else _texts(system, "system")
    text = _JOINT.join(block for block in blocks if not block.startswith(_BILLING))
    if text:
        yield Message(Role.SYSTEM, text)


def read_messages(items: Sequence[Json]) -> Iterator[Message]:
    """Yield the conversation; each tool result becomes a message of its own.

    Neighbouring assistant messages are one turn, as the vendor's API has it.
    """
    held: Message | None = None
    for number, item in enumerate(items):
        where = f"messages.{number}"
        fields = checked(item, dict, where)
        match required(fields, "role", str, where):
            case "assistant":
                said = _assistant(fields, where)
                held = _merged(held, said) if held else said
                continue
            case "user":
                messages = _user(fields, where)
            case "system":
                messages = iter([Message(Role.SYSTEM, _content_text(fields, where))])
            case role:
                refuse(f"{where}.role", f"{role!r} is neither user, assistant nor system")
        if held:
            yield held
            held = None
        yield from messages
    if held:
        yield held


def read_tools(tools: Sequence[Json], messages: Sequence[Json]) -> tuple[Tool, ...]:
    """Return the tools that the model may call.

    Left out: the vendor's server-side tools, and deferred ones that no message has loaded.
    """
    deferred = any(isinstance(tool, dict) and tool.get("defer_loading") for tool in tools)
    loaded = set(_loaded_tools(messages)) if deferred else set()
    return tuple(_tools(tools, loaded))


def _tools(tools: Sequence[Json], loaded: set[str]) -> Iterator[Tool]:
    for number, item in enumerate(tools):
        where = f"tools.{number}"
        fields = checked(item, dict, where)
        name = required(fields, "name", str, where)
        if optional(fields, "type", str, where) not in (None, "custom"):
            continue
        if fields.get("defer_loading") is True and name not in loaded:
            continue
        description = optional(fields, "description", str, where) or ""
        yield Tool(name, description, required(fields, "input_schema", dict, where))


def _loaded_tools(messages: Sequence[Json]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            inner = block.get("content") if isinstance(block, dict) else None
            for part in inner if isinstance(inner, list) else ():
                if isinstance(part, dict) and part.get("type") == "tool_reference":
                    yield str(part.get("tool_name"))


def _user(fields: Mapping[str, Json], where: str) -> Iterator[Message]:
    content = _content(fields, where)
    if isinstance(content, str):
        yield Message(Role.USER, content)
        return
    texts: list[str] = []
    for number, item in enumerate(content):
        place = f"{where}.content.{number}"
        block = checked(item, dict, place)
        if required(block, "type", str, place) != "tool_result":
            texts.append(_text(block, place))
            continue
        if texts:
            yield Message(Role.USER, _JOINT.join(texts))
            texts = []
        call_id = required(block, "tool_use_id", str, place)
        yield Message(Role.TOOL, _result_text(block, place), tool_call_id=call_id)
    if texts:
        yield Message(Role.USER, _JOINT.join(texts))


def _assistant(fields: Mapping[str, Json], where: str) -> Message:
    content = _content(fields, where)
    if isinstance(content, str):
        return Message(Role.ASSISTANT, content)
    texts, thoughts, calls = [], [], []
    for number, item in enumerate(content):
        place = f"{where}.content.{number}"
        block = checked(item, dict, place)
        match required(block, "type", str, place):
            case "tool_use":
                calls.append(_call(block, place))
            case "thinking":
                thoughts.append(required(block, "thinking", str, place))
            case "redacted_thinking":
                continue
            case _:
                texts.append(_text(block, place))
    return Message(Role.ASSISTANT, _JOINT.join(texts), _JOINT.join(thoughts), tuple(calls))


def _merged(first: Message, second: Message) -> Message:
    return Message(
        Role.ASSISTANT,
        _JOINT.join(filter(None, (first.text, second.text))),
        _JOINT.join(filter(None, (first.thinking, second.thinking))),
        first.tool_calls + second.tool_calls,
    )


def _call(block: Mapping[str, Json], where: str) -> ToolCall:
    return ToolCall(
        required(block, "id", str, where),
        required(block, "name", str, where),
        required(block, "input", dict, where),
    )


def _result_text(block: Mapping[str, Json], where: str) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return _JOINT.join(_texts(content, f"{where}.content"))


def _content_text(fields: Mapping[str, Json], where: str) -> str:
    content = _content(fields, where)
    return content if isinstance(content, str) else _JOINT.join(_texts(content, where))


def _content(fields: Mapping[str, Json], where: str) -> str | list[Json]:
    content = fields.get("content")
    if isinstance(content, str | list):
        return content
    refuse(f"{where}.content", "Input should be a valid string or array")


def _texts(blocks: Json, where: str) -> list[str]:
    items = checked(blocks, list, where)
    places = [f"{where}.{number}" for number in range(len(items))]
    pairs = zip(items, places, strict=True)
    return [_text(checked(item, dict, place), place) for item, place in pairs]


def _text(block: Mapping[str, Json], where: str) -> str:
    """Return a block as text; what is no text is named, for the models here only read."""
    kind = required(block, "type", str, where)
    match kind:
        case "text":
            return required(block, "text", str, where)
        case "tool_reference":
            return f"[tool {block.get('tool_name')} is loaded]"
        case "image" | "document":
            return f"[{kind} left out: this model reads text only]"
        case "search_result" | "server_tool_use" | "web_search_tool_result":
            return shown(dict(block), where)
        case _:
            refuse(f"{where}.type", f"{kind!r} is not a known content block type")
