"""Anthropic Messages, as Claude Code and the vendor's clients use it.

The model sees the offered tools before the conversation. Tools that messages add later (deferred
tools when loaded, and tools of a system message) are shown at that place, so that the tokens before
them stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import orjson

from swerl.core.chat import ChatReply, ChatRequest, Finish, Json, Message, Role, Tool, ToolCall
from swerl.core.contracts import WireReply
from swerl.core.errors import GatewayError
from swerl.gateway.dialects._wire import (
    Unanswered,
    bearer,
    checked,
    error_reply,
    failure,
    in_call_order,
    max_tokens,
    optional,
    refuse,
    required,
    shown,
    stop_texts,
    turns,
)

_STOP_REASONS: Mapping[Finish, str] = {
    Finish.STOP: "end_turn",
    Finish.TOOL_CALLS: "tool_use",
    Finish.LENGTH: "max_tokens",
    Finish.ABORT: "end_turn",
}
_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_BILLING = "x-anthropic-billing-header"
"""Beginning of a system block in which Claude Code sends a stamp that changes every request."""
_JOINT = "\n"
"""Put between the text blocks of one message."""
_ERROR = "[error]"
"""First line of a tool result that the client marks as an error."""
_SHOWN = {"search_result", "server_tool_use", "mcp_tool_use", "mcp_tool_listing"}
"""Blocks of the vendor's servers that the model sees as JSON."""


class _ThreadError(GatewayError):
    """A request refers to stored messages; the client then sends the whole conversation."""


def build() -> Anthropic:
    return Anthropic()


class Anthropic:
    """Implements Dialect."""

    routes: Mapping[str, str] = {
        "/v1/messages": "chat",
        "/v1/messages/count_tokens": "count_tokens",
        "/v1/models": "models",
    }

    def session_key(self, headers: Mapping[str, str]) -> str | None:
        """Return the bearer token, else `x-api-key`."""
        return bearer(headers) or headers.get("x-api-key") or None

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """Read a request; sampling settings and cache markers are ignored.

        Raises GatewayError on a body that the vendor would also refuse.
        """
        thread = optional(body, "thread", dict) or {}
        if thread.get("type") == "continue":
            raise _ThreadError("thread: nothing is stored here; send the whole conversation")
        items = required(body, "messages", list)
        if not items:
            raise GatewayError("messages: at least one message is required")
        if optional(body, "mcp_servers", list):
            raise GatewayError("mcp_servers: the gateway calls none; let the client do so")
        tools = _Tools(optional(body, "tools", list) or [])
        # The vendor's API also takes neighbouring messages of the assistant as one.
        messages = (*_read_system(body.get("system")), *turns(_read_messages(items, tools)))
        choice = body.get("tool_choice")
        return ChatRequest(
            messages=in_call_order(messages, Unanswered.REFUSED_AT_ONCE),
            allows_calls=not isinstance(choice, dict) or choice.get("type") != "none",
            stop=stop_texts(body, "stop_sequences"),
            tools=tools.offered,
            late_tools=tools.late,
            max_tokens=max_tokens(body, "max_tokens"),
            stream=optional(body, "stream", bool) or False,
            model=required(body, "model", str),
        )

    def reply(self, reply: ChatReply) -> Json:
        return {
            **_envelope(reply),
            "content": list(_blocks(reply)),
            "stop_reason": _stop_reason(reply),
            "usage": _usage(reply, reply.usage.completion_tokens),
        }

    def events(self, reply: ChatReply) -> Iterator[bytes]:
        opening = {**_envelope(reply), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", {"message": {**opening, "usage": _usage(reply, 1)}})
        for index, block in enumerate(_blocks(reply)):
            empty, deltas = _in_deltas(block)
            yield _event("content_block_start", {"index": index, "content_block": empty})
            for delta in deltas:
                yield _event("content_block_delta", {"index": index, "delta": delta})
            yield _event("content_block_stop", {"index": index})
        end: Json = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop}
        usage = _usage(reply, reply.usage.completion_tokens)
        yield _event("message_delta", {"delta": end, "usage": usage})
        yield _event("message_stop", {})

    def error(self, error: Exception) -> WireReply:
        failed = failure(error)
        status = 529 if failed.status == 503 else failed.status
        detail: dict[str, Json] = {"type": _ERROR_TYPES[status], "message": failed.message}
        if isinstance(error, _ThreadError):
            detail["details"] = {"error_code": "thread_not_found"}
        return error_reply(status, {"type": "error", "error": detail}, failed.headers)


def _envelope(reply: ChatReply) -> dict[str, Json]:
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "stop_sequence": reply.stop,
    }


def _stop_reason(reply: ChatReply) -> str:
    return _STOP_REASONS[reply.finish] if reply.stop is None else "stop_sequence"


def _usage(reply: ChatReply, output_tokens: int) -> Json:
    """Count as the vendor does: `input_tokens` leaves out cached tokens."""
    usage = reply.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": {"thinking_tokens": min(usage.thinking_tokens, output_tokens)},
    }


def _blocks(reply: ChatReply) -> Iterator[dict[str, Json]]:
    message = reply.message
    if message.thinking:
        yield {"type": "thinking", "thinking": message.thinking, "signature": ""}
    if message.text:
        yield {"type": "text", "text": message.text}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _in_deltas(block: dict[str, Json]) -> tuple[Json, list[Json]]:
    """Return the block without content, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            deltas: list[Json] = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return {**block, "thinking": ""}, deltas
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            arguments = orjson.dumps(block["input"]).decode()
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _event(name: str, data: dict[str, Json]) -> bytes:
    payload = orjson.dumps({"type": name, **data})
    return b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"


def _read_system(system: Json) -> Iterator[Message]:
    """Yield the system prompt, if any; it is a string or a list of text blocks."""
    if system is None:
        return
    blocks = [system] if isinstance(system, str) else _texts(system, "system")
    text = _JOINT.join(block for block in blocks if not block.startswith(_BILLING))
    if text:
        yield Message(Role.SYSTEM, text)


def _read_messages(items: Sequence[Json], tools: _Tools) -> Iterator[Message]:
    """Yield the conversation; each tool result becomes a message of its own.

    Tools that a message adds are recorded in `tools`.
    """
    for number, item in enumerate(items):
        where = f"messages.{number}"
        fields = checked(item, dict, where)
        match required(fields, "role", str, where):
            case "assistant":
                yield _assistant(fields, where)
            case "user":
                yield from _user(fields, where, tools)
            case "system":
                yield from _late_system(fields, where, tools)
            case role:
                refuse(f"{where}.role", f"{role!r} is neither user, assistant nor system")


def _late_system(fields: Mapping[str, Json], where: str, tools: _Tools) -> Iterator[Message]:
    """Yield a system message, unless it only changes settings."""
    if "content" not in fields and "output_config" in fields:
        return
    content = _content(fields, where)
    if not isinstance(content, str):
        content = _JOINT.join(_texts(content, f"{where}.content", tools))
    if content:
        yield Message(Role.SYSTEM, content)


def _user(fields: Mapping[str, Json], where: str, tools: _Tools) -> Iterator[Message]:
    content = _content(fields, where)
    if isinstance(content, str):
        yield Message(Role.USER, content)
        return
    texts: list[str] = []
    for number, item in enumerate(content):
        place = f"{where}.content.{number}"
        block = checked(item, dict, place)
        if required(block, "type", str, place) != "tool_result":
            texts.append(_text(block, place, tools))
            continue
        if texts:
            yield Message(Role.USER, _JOINT.join(texts))
            texts = []
        call_id = required(block, "tool_use_id", str, place)
        yield Message(Role.TOOL, _result_text(block, place, tools), tool_call_id=call_id)
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
            case "redacted_thinking" | "fallback":
                continue
            case _:
                texts.append(_text(block, place))
    return Message(Role.ASSISTANT, _JOINT.join(texts), _JOINT.join(thoughts), tuple(calls))


def _call(block: Mapping[str, Json], where: str) -> ToolCall:
    return ToolCall(
        required(block, "id", str, where),
        required(block, "name", str, where),
        required(block, "input", dict, where),
    )


def _result_text(block: Mapping[str, Json], where: str, tools: _Tools) -> str:
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        content = _JOINT.join(_texts(content, f"{where}.content", tools))
    mark = [_ERROR] if block.get("is_error") is True else []
    return _JOINT.join([*mark, *filter(None, [content])])


def _document(block: Mapping[str, Json], where: str) -> str:
    """Return a document of plain text or of blocks; another one becomes a note."""
    source, place = optional(block, "source", dict, where) or {}, f"{where}.source"
    match source.get("type"):
        case "text":
            text = required(source, "data", str, place)
        case "content":
            content = source.get("content")
            blocks = [content] if isinstance(content, str) else _texts(content, f"{place}.content")
            text = _JOINT.join(blocks)
        case _:
            text = "[document left out: this model reads text only]"
    notes = [optional(block, key, str, where) for key in ("title", "context")]
    return _JOINT.join([*filter(None, notes), text])


def _content(fields: Mapping[str, Json], where: str) -> str | list[Json]:
    content = fields.get("content")
    if isinstance(content, str | list):
        return content
    refuse(f"{where}.content", "Input should be a valid string or array")


def _texts(blocks: Json, where: str, tools: _Tools | None = None) -> list[str]:
    items = checked(blocks, list, where)
    places = [f"{where}.{number}" for number in range(len(items))]
    pairs = zip(items, places, strict=True)
    return [_text(checked(item, dict, place), place, tools) for item, place in pairs]


def _text(block: Mapping[str, Json], where: str, tools: _Tools | None = None) -> str:
    """Return a block as text; an image or file becomes a note for the model."""
    kind = required(block, "type", str, where)
    match kind:
        case "text":
            return required(block, "text", str, where)
        case "tool_reference" if tools:
            return tools.load(required(block, "tool_name", str, where))
        case "tool_addition" | "tool_removal" if tools:
            return tools.change(block, where)
        case "compaction":
            return optional(block, "content", str, where) or ""
        case "document":
            return _document(block, where)
        case "image" | "container_upload":
            return f"[{kind} left out: this model reads text only]"
        case _ if kind in _SHOWN or kind.endswith("_tool_result"):
            return shown(dict(block), where)
        case _:
            refuse(f"{where}.type", f"{kind!r} is not a known content block type")


class _Tools:
    """The tools of one request; reading its messages adds late ones."""

    def __init__(self, items: Sequence[Json]) -> None:
        """Read the request's list. Raises GatewayError on a tool that only the vendor can run."""
        self._offered: dict[str, Tool] = {}
        self._deferred: dict[str, Tool] = {}
        self._late: dict[str, Tool] = {}
        for number, item in enumerate(items):
            where = f"tools.{number}"
            fields = checked(item, dict, where)
            tool = _tool(fields, where)
            if tool.name in self._offered or tool.name in self._deferred:
                refuse(where, f"tool names must be unique, and {tool.name!r} comes twice")
            is_deferred = fields.get("defer_loading") is True
            (self._deferred if is_deferred else self._offered)[tool.name] = tool

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Tools that the model can call from the start."""
        return tuple(self._offered.values())

    @property
    def late(self) -> tuple[Tool, ...]:
        """Tools that the messages read so far added."""
        return tuple(self._late.values())

    def load(self, name: str) -> str:
        """Load a deferred tool and return the note that the model sees."""
        tool = self._deferred.get(name)
        if tool is None:
            return f"[tool {name} is loaded]"
        return self._add_late(tool)

    def change(self, block: Mapping[str, Json], where: str) -> str:
        """Read a `tool_addition` or `tool_removal` and return the note that the model sees."""
        place = f"{where}.tool"
        tool = required(block, "tool", dict, where)
        match required(tool, "type", str, place):
            case "tool_reference":
                name = required(tool, "name", str, place)
                if block["type"] == "tool_addition":
                    return self.load(name)
                return f"[tool {name} can be called no more]"
            case "tool_definition":
                defined = required(tool, "definition", dict, place)
                return self._add_late(_tool(defined, f"{place}.definition"))
            case kind:
                refuse(place, f"{kind!r} needs the vendor's servers and cannot run here")

    def _add_late(self, tool: Tool) -> str:
        self._late[tool.name] = tool
        fields: Json = {
            "name": tool.name,
            "description": tool.description,
            "input_schema": dict(tool.parameters),
        }
        return f"[tool {tool.name} can be called: {shown(fields, f'tool {tool.name}')}]"


def _tool(fields: Mapping[str, Json], where: str) -> Tool:
    kind = optional(fields, "type", str, where) or "custom"
    if kind != "custom" and "input_schema" not in fields:
        problem = (
            f"{kind!r} needs the vendor's servers or models; offer a tool with an input_schema"
        )
        refuse(where, problem)
    return Tool(
        required(fields, "name", str, where),
        optional(fields, "description", str, where) or "",
        required(fields, "input_schema", dict, where),
    )
