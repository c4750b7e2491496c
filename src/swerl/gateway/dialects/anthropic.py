"""Anthropic Messages, as Claude Code and the vendor's clients speak it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import orjson

from swerl.core.chat import ChatReply, ChatRequest, Finish, Json
from swerl.core.contracts import WireReply
from swerl.core.errors import GatewayError
from swerl.gateway.dialects._anthropic_request import read_messages, read_system
from swerl.gateway.dialects._anthropic_tools import Tools
from swerl.gateway.dialects._status import failure
from swerl.gateway.dialects._wire import (
    Unanswered,
    bearer,
    check_results,
    error_reply,
    max_tokens,
    optional,
    required,
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


class _ThreadError(GatewayError):
    """A request leans on stored messages. The vendor's client then sends the whole conversation."""


def build() -> Anthropic:
    """Build the dialect."""
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
        """Read a request; sampling settings, `tool_choice` and cache markers are not looked at.

        Raises GatewayError on a body that the vendor would refuse too.
        """
        thread = optional(body, "thread", dict) or {}
        if thread.get("type") == "continue":
            raise _ThreadError("thread: nothing is stored here; send the whole conversation")
        items = required(body, "messages", list)
        if not items:
            raise GatewayError("messages: at least one message is required")
        if optional(body, "mcp_servers", list):
            raise GatewayError("mcp_servers: nobody calls them from here; let the client do so")
        tools = Tools(optional(body, "tools", list) or [])
        messages = (*read_system(body.get("system")), *read_messages(items, tools))
        check_results(messages, Unanswered.REFUSED_AT_ONCE)
        return ChatRequest(
            messages=messages,
            tools=tools.offered,
            late_tools=tools.late,
            max_tokens=max_tokens(body, "max_tokens"),
            stream=optional(body, "stream", bool) or False,
            model=required(body, "model", str),
        )

    def reply(self, reply: ChatReply) -> Json:
        """Build the body of an answer without streaming."""
        return {
            **_envelope(reply),
            "content": list(_blocks(reply)),
            "stop_reason": _STOP_REASONS[reply.finish],
            "usage": _usage(reply, reply.usage.completion_tokens),
        }

    def events(self, reply: ChatReply) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer."""
        opening = {**_envelope(reply), "content": [], "stop_reason": None}
        yield _event("message_start", {"message": {**opening, "usage": _usage(reply, 1)}})
        for index, block in enumerate(_blocks(reply)):
            empty, deltas = _in_deltas(block)
            yield _event("content_block_start", {"index": index, "content_block": empty})
            for delta in deltas:
                yield _event("content_block_delta", {"index": index, "delta": delta})
            yield _event("content_block_stop", {"index": index})
        end: Json = {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": None}
        usage = _usage(reply, reply.usage.completion_tokens)
        yield _event("message_delta", {"delta": end, "usage": usage})
        yield _event("message_stop", {})

    def error(self, error: Exception) -> WireReply:
        """Build the vendor-shaped answer for a failure."""
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
        "stop_sequence": None,
    }


def _usage(reply: ChatReply, output_tokens: int) -> Json:
    """Count as the vendor does: `input_tokens` leaves out what the cache already held."""
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
    """Return the block as it opens, and the deltas that fill it."""
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
