"""OpenAI Responses, as Codex and the vendor's clients use it. Nothing is stored.

The model sees a tool of a namespace as `namespace.tool`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import orjson

from swerl.core.chat import ChatReply, ChatRequest, Finish, Json, Message, Role, Tool, ToolCall
from swerl.core.contracts import WireReply
from swerl.core.errors import GatewayError
from swerl.gateway.dialects._wire import (
    Unanswered,
    bearer,
    call_arguments,
    checked,
    error_reply,
    failure,
    in_call_order,
    max_tokens,
    openai_error,
    optional,
    qualified,
    read_text_tool,
    refuse,
    required,
    shown,
    text_call,
    text_of,
    turns,
)

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_SETTINGS = {"additional_tools", "mcp_list_tools", "configuration_update"}
_TEXT_PARTS = {"input_text", "output_text", "reasoning_text", "summary_text", "text"}
_OTHER_PARTS = {"input_image", "input_file", "input_audio", "computer_screenshot"}


def build() -> OpenAIResponses:
    return OpenAIResponses()


class OpenAIResponses:
    """Implements Dialect."""

    routes: Mapping[str, str] = {
        "/v1/responses": "chat",
        "/v1/responses/input_tokens": "count_tokens",
        "/v1/models": "models",
    }

    def session_key(self, headers: Mapping[str, str]) -> str | None:
        """Return the bearer token."""
        return bearer(headers)

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """Read a request; sampling settings are ignored.

        Raises GatewayError on a body that the vendor would also refuse, and on one that refers to
        a stored request.
        """
        _refuse_unserved(body)
        instructions = optional(body, "instructions", str)
        system: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
        messages = (*_read_input(system), *turns(_read_input(body.get("input"))))
        if not messages:
            raise GatewayError("input: at least one item is required")
        return ChatRequest(
            messages=in_call_order(messages, Unanswered.REFUSED),
            allows_calls=body.get("tool_choice") != "none",
            tools=tuple(_read_tools(optional(body, "tools", list) or [])),
            max_tokens=max_tokens(body, "max_output_tokens"),
            stream=optional(body, "stream", bool) or False,
            model=required(body, "model", str),
        )

    def reply(self, reply: ChatReply) -> Json:
        return _response(reply, list(_items(reply)))

    def events(self, reply: ChatReply) -> Iterator[bytes]:
        for number, (name, data) in enumerate(_events(reply)):
            payload = orjson.dumps({"type": name, "sequence_number": number, **data})
            yield b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"

    def error(self, error: Exception) -> WireReply:
        failed = failure(error)
        return error_reply(failed.status, openai_error(error, failed), failed.headers)


def _refuse_unserved(body: Mapping[str, Json]) -> None:
    """Raise GatewayError on a request that the gateway cannot answer as asked."""
    for key in ("previous_response_id", "conversation", "prompt"):
        if body.get(key) is not None:
            refuse(key, "nothing is stored here; send the whole input")
    if optional(body, "background", bool):
        refuse("background", "nothing is stored here; wait for the answer, or stream it")
    included = optional(body, "include", list) or []
    if "message.output_text.logprobs" in included or body.get("top_logprobs"):
        refuse("top_logprobs", "log-probabilities are kept for training, not returned")


def _events(reply: ChatReply) -> Iterator[tuple[str, dict[str, Json]]]:
    started = _response(reply, [], status="in_progress")
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    items = list(_items(reply))
    for index, item in enumerate(items):
        place: dict[str, Json] = {"output_index": index}
        yield "response.output_item.added", {**place, "item": _empty(item)}
        yield from _fill(item, place)
        yield "response.output_item.done", {**place, "item": item}
    whole = _response(reply, items)
    yield f"response.{whole['status']}", {"response": whole}


def _fill(
    item: Mapping[str, Json], place: Mapping[str, Json]
) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the events that fill an item, each text in one delta."""
    at = {**place, "item_id": item["id"]}
    if item["type"] == "function_call":
        text = item["arguments"]
        yield "response.function_call_arguments.delta", {**at, "delta": text}
        whole = {**at, "name": item["name"], "arguments": text}
        yield "response.function_call_arguments.done", whole
        return
    if item["type"] == "custom_tool_call":
        yield "response.custom_tool_call_input.delta", {**at, "delta": item["input"]}
        yield "response.custom_tool_call_input.done", {**at, "input": item["input"]}
        return
    parts = item["content"]
    assert isinstance(parts, list)
    kind = "output_text" if item["type"] == "message" else "reasoning_text"
    for index, part in enumerate(parts):
        assert isinstance(part, dict)
        here = {**at, "content_index": index}
        yield "response.content_part.added", {**here, "part": {**part, "text": ""}}
        yield f"response.{kind}.delta", {**here, "delta": part["text"], "logprobs": []}
        yield f"response.{kind}.done", {**here, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**here, "part": part}


def _empty(item: Mapping[str, Json]) -> dict[str, Json]:
    """Return an item without its content, as its first event shows it."""
    empty: dict[str, Json] = {"arguments": "", "input": "", "content": []}
    return {key: empty.get(key, value) for key, value in item.items()} | {"status": "in_progress"}


def _items(reply: ChatReply) -> Iterator[dict[str, Json]]:
    message = reply.message
    if message.thinking:
        content: list[Json] = [{"type": "reasoning_text", "text": message.thinking}]
        yield {"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content}
    if message.text:
        part: Json = {"type": "output_text", "text": message.text, "annotations": []}
        yield {
            "type": "message",
            "id": f"msg_{reply.id}",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
    for number, call in enumerate(message.tool_calls):
        owner: dict[str, Json] = {"namespace": call.namespace} if call.namespace else {}
        name = call.name.removeprefix(f"{call.namespace}.") if owner else call.name
        if call.is_text:
            yield {
                "type": "custom_tool_call",
                "id": f"ctc_{reply.id}_{number}",
                "call_id": call.id,
                "name": name,
                **owner,
                "input": text_of(call),
            }
            continue
        yield {
            "type": "function_call",
            "id": f"fc_{reply.id}_{number}",
            "call_id": call.id,
            "name": name,
            **owner,
            "arguments": orjson.dumps(dict(call.arguments)).decode(),
            "status": "completed",
        }


def _response(reply: ChatReply, items: Sequence[Json], status: str = "") -> dict[str, Json]:
    cut = reply.finish is Finish.LENGTH
    ended = status or ("incomplete" if cut else "completed")
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": ended,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if ended == "incomplete" else None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "output": [*items],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None if status else _usage(reply),
    }


def _usage(reply: ChatReply) -> Json:
    usage = reply.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _read_input(value: Json) -> Iterator[Message]:
    """Yield the conversation, each item as a message."""
    if isinstance(value, str):
        yield Message(Role.USER, value)
        return
    for number, item in enumerate(checked(value, list, "input")):
        yield _message(item, f"input.{number}")


def _read_tools(items: Sequence[Json], namespace: str = "") -> Iterator[Tool]:
    """Yield the offered functions, without the vendor's own tools, which run on its servers."""
    for number, item in enumerate(items):
        where = f"tools.{number}"
        fields = checked(item, dict, where)
        kind = required(fields, "type", str, where)
        if kind == "namespace" and not namespace:
            inner = required(fields, "tools", list, where)
            yield from _read_tools(inner, required(fields, "name", str, where))
        elif kind == "custom":
            yield read_text_tool(fields, where, namespace)
        elif kind == "function":
            yield Tool(
                qualified(namespace, required(fields, "name", str, where)),
                optional(fields, "description", str, where) or "",
                optional(fields, "parameters", dict, where) or {},
                namespace=namespace,
            )


def _message(item: Json, where: str) -> Message:
    fields = checked(item, dict, where)
    match optional(fields, "type", str, where) or "message":
        case "message":
            name = required(fields, "role", str, where)
            if name not in _ROLES:
                refuse(f"{where}.role", f"{name!r} is not a known role")
            return Message(_ROLES[name], _text(fields.get("content"), f"{where}.content"))
        case "reasoning":
            return Message(Role.ASSISTANT, thinking=_thinking(fields, where))
        case "function_call" | "custom_tool_call":
            return Message(Role.ASSISTANT, tool_calls=(_call(fields, where),))
        case "function_call_output" | "custom_tool_call_output":
            call_id = required(fields, "call_id", str, where)
            output = _text(fields.get("output"), f"{where}.output")
            return Message(Role.TOOL, output, tool_call_id=call_id)
        case "item_reference":
            refuse(where, "nothing is stored here: send the item itself")
        case "compaction_trigger":
            refuse(where, "nothing is compacted here: ask the model for a summary")
        case kind:
            # The model sees items of the vendor's own tools as JSON.
            return Message(_role_of(kind), shown({**fields, "type": kind}, where))


def _role_of(kind: str) -> Role:
    """Return the role of an item that is no message."""
    if kind in _SETTINGS:
        return Role.SYSTEM
    return Role.USER if kind.endswith(("_output", "_response")) else Role.ASSISTANT


def _call(fields: Mapping[str, Json], where: str) -> ToolCall:
    namespace = optional(fields, "namespace", str, where) or ""
    full = qualified(namespace, required(fields, "name", str, where))
    call_id = required(fields, "call_id", str, where)
    if fields["type"] == "custom_tool_call":
        return text_call(call_id, full, required(fields, "input", str, where))
    return ToolCall(call_id, full, call_arguments(required(fields, "arguments", str, where)))


def _thinking(fields: Mapping[str, Json], where: str) -> str:
    parts = [*(optional(fields, "content", list, where) or [])]
    parts = parts or [*(optional(fields, "summary", list, where) or [])]
    return _text(parts, f"{where}.content")


def _text(content: Json, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = checked(content, list, where)
    return "\n".join(_part(part, f"{where}.{number}") for number, part in enumerate(parts))


def _part(item: Json, where: str) -> str:
    """Return a content part as text; an image or file becomes a note."""
    fields = checked(item, dict, where)
    kind = required(fields, "type", str, where)
    if kind in _TEXT_PARTS:
        return required(fields, "text", str, where)
    if kind == "refusal":
        return required(fields, "refusal", str, where)
    if kind in _OTHER_PARTS:
        return f"[{kind} left out: this model reads text only]"
    refuse(f"{where}.type", f"{kind!r} is not a known content part type")
