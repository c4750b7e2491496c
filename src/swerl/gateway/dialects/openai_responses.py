"""OpenAI Responses, as Codex and the vendor's clients speak it. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import orjson

from swerl.core.chat import ChatReply, ChatRequest, Finish, Json
from swerl.core.contracts import WireReply
from swerl.core.errors import GatewayError
from swerl.gateway.dialects._free_text import text_of
from swerl.gateway.dialects._responses_request import read_input, read_tools
from swerl.gateway.dialects._status import failure, openai_error
from swerl.gateway.dialects._wire import (
    Unanswered,
    bearer,
    check_results,
    error_reply,
    max_tokens,
    optional,
    refuse,
    required,
)


def build() -> OpenAIResponses:
    """Build the dialect."""
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
        """Read a request; sampling settings and `tool_choice` are not looked at.

        Raises GatewayError on a body that the vendor would refuse too, and on one that leans on
        what an earlier request stored.
        """
        _refuse_unserved(body)
        instructions = optional(body, "instructions", str)
        told: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
        messages = (*read_input(told), *read_input(body.get("input")))
        if not messages:
            raise GatewayError("input: at least one item is required")
        check_results(messages, Unanswered.REFUSED)
        return ChatRequest(
            messages=messages,
            tools=tuple(read_tools(optional(body, "tools", list) or [])),
            max_tokens=max_tokens(body, "max_output_tokens"),
            stream=optional(body, "stream", bool) or False,
            model=required(body, "model", str),
        )

    def reply(self, reply: ChatReply) -> Json:
        """Build the body of an answer without streaming."""
        return _response(reply, list(_items(reply)))

    def events(self, reply: ChatReply) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer."""
        for number, (name, data) in enumerate(_events(reply)):
            payload = orjson.dumps({"type": name, "sequence_number": number, **data})
            yield b"event: " + name.encode() + b"\ndata: " + payload + b"\n\n"

    def error(self, error: Exception) -> WireReply:
        """Build the vendor-shaped answer for a failure."""
        failed = failure(error)
        return error_reply(failed.status, openai_error(error, failed), failed.headers)


def _refuse_unserved(body: Mapping[str, Json]) -> None:
    """Raise GatewayError where the answer would not be what the client asked for."""
    for key in ("previous_response_id", "conversation", "prompt"):
        if body.get(key) is not None:
            refuse(key, "nothing is stored here; send the whole input")
    if optional(body, "background", bool):
        refuse("background", "nothing is stored here; wait for the answer, or stream it")
    included = optional(body, "include", list) or []
    if "message.output_text.logprobs" in included or body.get("top_logprobs"):
        refuse("top_logprobs", "log-probabilities are kept for training and not given out")


def _events(reply: ChatReply) -> Iterator[tuple[str, dict[str, Json]]]:
    begun = _response(reply, [], status="in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
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
    """Yield the events that fill an item, each text in one piece."""
    at = {**place, "item_id": item["id"]}
    if item["type"] == "function_call":
        text = item["arguments"]
        yield "response.function_call_arguments.delta", {**at, "delta": text}
        done = {**at, "name": item["name"], "arguments": text}
        yield "response.function_call_arguments.done", done
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
    """Return an item as it is when it opens."""
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
        namespace, _, name = call.name.rpartition(".")
        owner: dict[str, Json] = {"namespace": namespace} if namespace else {}
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
