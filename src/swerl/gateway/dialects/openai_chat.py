"""OpenAI Chat Completions, as many agents and servers use it."""

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
    read_text_tool,
    refuse,
    required,
    stop_texts,
    text_call,
    text_of,
)

_FINISH_REASONS: Mapping[Finish, str] = {
    Finish.STOP: "stop",
    Finish.TOOL_CALLS: "tool_calls",
    Finish.LENGTH: "length",
    Finish.ABORT: "stop",
}


def build() -> OpenAIChat:
    return OpenAIChat()


class OpenAIChat:
    """Implements Dialect."""

    routes: Mapping[str, str] = {"/v1/chat/completions": "chat", "/v1/models": "models"}

    def session_key(self, headers: Mapping[str, str]) -> str | None:
        """Return the bearer token."""
        return bearer(headers)

    def parse(self, body: Mapping[str, Json]) -> ChatRequest:
        """Read a request; sampling settings are ignored.

        Raises GatewayError on a body that the vendor would also refuse.
        """
        _refuse_unserved(body)
        items = required(body, "messages", list)
        if not items:
            raise GatewayError("messages: at least one message is required")
        places = [f"messages.{number}" for number in range(len(items))]
        messages = tuple(map(_message, items, places))
        return ChatRequest(
            messages=in_call_order(messages, Unanswered.ACCEPTED),
            allows_calls=body.get("tool_choice") != "none",
            stop=stop_texts(body, "stop"),
            tools=tuple(_tools(optional(body, "tools", list) or [])),
            max_tokens=max_tokens(body, "max_completion_tokens", "max_tokens"),
            stream=optional(body, "stream", bool) or False,
            model=required(body, "model", str),
        )

    def reply(self, reply: ChatReply) -> Json:
        message: dict[str, Json] = {"role": "assistant", "content": reply.message.text or None}
        if reply.message.thinking:
            message["reasoning_content"] = reply.message.thinking
        if reply.message.tool_calls:
            message["tool_calls"] = list(_calls(reply.message))
        choice: Json = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[reply.finish],
        }
        return {
            **_envelope(reply, "chat.completion"),
            "choices": [choice],
            "usage": _usage(reply),
        }

    def events(self, reply: ChatReply) -> Iterator[bytes]:
        """Yield the server-sent events; the last chunk carries the usage."""
        message = reply.message
        yield _chunk(reply, {"role": "assistant", "content": ""})
        if message.thinking:
            yield _chunk(reply, {"reasoning_content": message.thinking})
        if message.text:
            yield _chunk(reply, {"content": message.text})
        for index, call in enumerate(_calls(message)):
            yield _chunk(reply, {"tool_calls": [{"index": index, **call}]})
        yield _chunk(reply, {}, last=True)
        yield b"data: [DONE]\n\n"

    def error(self, error: Exception) -> WireReply:
        failed = failure(error)
        return error_reply(failed.status, openai_error(error, failed), failed.headers)


def _refuse_unserved(body: Mapping[str, Json]) -> None:
    """Raise GatewayError on a request that the gateway cannot answer as asked."""
    if optional(body, "n", int) not in (None, 1):
        refuse("n", "each request is answered once")
    if optional(body, "logprobs", bool):
        refuse("logprobs", "log-probabilities are kept for training, not returned")
    for key in ("functions", "function_call"):
        if body.get(key):
            refuse(key, "this form is no longer served: offer `tools`")


def _message(item: Json, where: str) -> Message:
    fields = checked(item, dict, where)
    match required(fields, "role", str, where):
        case "system" | "developer":
            return Message(Role.SYSTEM, _content(fields, where))
        case "user":
            return Message(Role.USER, _content(fields, where))
        case "tool":
            call_id = required(fields, "tool_call_id", str, where)
            return Message(Role.TOOL, _content(fields, where), tool_call_id=call_id)
        case "assistant":
            calls = optional(fields, "tool_calls", list, where) or []
            return Message(
                Role.ASSISTANT,
                _content(fields, where) or optional(fields, "refusal", str, where) or "",
                optional(fields, "reasoning_content", str, where) or "",
                tuple(_call(call, f"{where}.tool_calls.{n}") for n, call in enumerate(calls)),
            )
        case role:
            refuse(f"{where}.role", f"{role!r} is not a known role")


def _content(fields: Mapping[str, Json], where: str) -> str:
    content = fields.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = checked(content, list, f"{where}.content")
    return "\n".join(_part(part, f"{where}.content.{n}") for n, part in enumerate(parts))


def _part(item: Json, where: str) -> str:
    """Return a content part as text; an image or file becomes a note."""
    fields = checked(item, dict, where)
    match required(fields, "type", str, where):
        case "text":
            return required(fields, "text", str, where)
        case "refusal":
            return required(fields, "refusal", str, where)
        case ("image_url" | "input_audio" | "video_url" | "file") as kind:
            return f"[{kind} left out: this model reads text only]"
        case kind:
            refuse(f"{where}.type", f"{kind!r} is not a known content part type")


def _call(item: Json, where: str) -> ToolCall:
    fields = checked(item, dict, where)
    if fields.get("type") == "custom":
        custom = required(fields, "custom", dict, where)
        name = required(custom, "name", str, f"{where}.custom")
        text = required(custom, "input", str, f"{where}.custom")
        return text_call(required(fields, "id", str, where), name, text)
    function = required(fields, "function", dict, where)
    written = required(function, "arguments", str, f"{where}.function")
    return ToolCall(
        required(fields, "id", str, where),
        required(function, "name", str, f"{where}.function"),
        call_arguments(written),
    )


def _tools(items: Sequence[Json]) -> Iterator[Tool]:
    for number, item in enumerate(items):
        where = f"tools.{number}"
        fields = checked(item, dict, where)
        kind = required(fields, "type", str, where)
        if kind == "custom":
            yield read_text_tool(required(fields, "custom", dict, where), f"{where}.custom")
            continue
        if kind != "function":
            refuse(f"{where}.type", f"{kind!r} is neither function nor custom")
        function = required(fields, "function", dict, where)
        yield Tool(
            required(function, "name", str, f"{where}.function"),
            optional(function, "description", str, f"{where}.function") or "",
            optional(function, "parameters", dict, f"{where}.function") or {},
        )


def _calls(message: Message) -> Iterator[dict[str, Json]]:
    for call in message.tool_calls:
        if call.is_text:
            custom: Json = {"name": call.name, "input": text_of(call)}
            yield {"id": call.id, "type": "custom", "custom": custom}
            continue
        arguments = orjson.dumps(dict(call.arguments)).decode()
        function: Json = {"name": call.name, "arguments": arguments}
        yield {"id": call.id, "type": "function", "function": function}


def _chunk(reply: ChatReply, delta: dict[str, Json], *, last: bool = False) -> bytes:
    reason = _FINISH_REASONS[reply.finish] if last else None
    choice: Json = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    chunk = {**_envelope(reply, "chat.completion.chunk"), "choices": [choice]}
    if last:
        chunk["usage"] = _usage(reply)
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _envelope(reply: ChatReply, kind: str) -> dict[str, Json]:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": int(time.time()),
        "model": reply.model,
    }


def _usage(reply: ChatReply) -> Json:
    usage = reply.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
    }
