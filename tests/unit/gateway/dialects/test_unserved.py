"""Requests that are malformed or cannot be served, and settings that the gateway ignores."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from swerl.core.errors import GatewayError
from swerl.gateway.dialects import anthropic, openai_chat, openai_responses

ASK: Any = {"role": "user", "content": "fix it"}
BODIES: Mapping[ModuleType, Any] = {
    anthropic: {"model": "m", "max_tokens": 5, "messages": [ASK]},
    openai_chat: {"model": "m", "messages": [ASK]},
    openai_responses: {"model": "m", "input": [ASK]},
}
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}}
IGNORED: Mapping[ModuleType, Any] = {
    anthropic: {
        "temperature": 0.1,
        "top_p": 0.1,
        "top_k": 1,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "metadata": {"user_id": "{}"},
        "service_tier": "auto",
        "mcp_servers": [],
    },
    openai_chat: {
        "temperature": 0.1,
        "top_p": 0.1,
        "seed": 5,
        "n": 1,
        "logprobs": False,
        "logit_bias": {"5": 1},
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}},
        "reasoning_effort": "high",
        "stream_options": {"include_usage": True},
        "functions": [],
        "store": False,
    },
    openai_responses: {
        "temperature": 0.1,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "t", "schema": SCHEMA}},
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "store": False,
        "background": False,
        "truncation": "auto",
        "previous_response_id": None,
        "top_logprobs": 0,
    },
}


@pytest.mark.parametrize("dialect", BODIES, ids=lambda module: module.__name__)
def test_settings_that_a_session_decides_change_nothing(dialect: ModuleType) -> None:
    plain = dialect.build().parse(BODIES[dialect])

    assert dialect.build().parse({**BODIES[dialect], **IGNORED[dialect]}) == plain


@pytest.mark.parametrize(
    ("dialect", "more", "word"),
    [
        (anthropic, {"thread": {"type": "continue"}}, "send the whole conversation"),
        (openai_chat, {"n": 2}, "answered once"),
        (openai_chat, {"logprobs": True}, "kept for training"),
        (openai_chat, {"functions": [{"name": "f"}]}, "`tools`"),
        (openai_chat, {"function_call": "auto"}, "`tools`"),
        (openai_chat, {"tools": [{"type": "web_search"}]}, "neither function nor custom"),
        (openai_responses, {"previous_response_id": "resp_1"}, "nothing is stored"),
        (openai_responses, {"conversation": "conv_1"}, "nothing is stored"),
        (openai_responses, {"prompt": {"id": "pmpt_1"}}, "nothing is stored"),
        (openai_responses, {"background": True}, "nothing is stored"),
        (openai_responses, {"top_logprobs": 2}, "kept for training"),
        (openai_responses, {"include": ["message.output_text.logprobs"]}, "kept for training"),
        (openai_responses, {"input": [ASK, {"type": "compaction_trigger"}]}, "compacted"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    dialect: ModuleType, more: Any, word: str
) -> None:
    with pytest.raises(GatewayError, match=word):
        dialect.build().parse({**BODIES[dialect], **more})


BLOCK = "messages.0.content.0"
NO_INPUT = {"type": "tool_use", "id": "a", "name": "b"}


@pytest.mark.parametrize(
    ("dialect", "item", "place"),
    [
        (anthropic, {"role": "user"}, "messages.0.content"),
        (anthropic, {"role": "user", "content": [{"type": "hologram"}]}, f"{BLOCK}.type"),
        (anthropic, {"role": "user", "content": [{"text": "x"}]}, f"{BLOCK}.type"),
        (anthropic, {"role": "user", "content": [{"type": "text", "text": 5}]}, f"{BLOCK}.text"),
        (anthropic, {"role": "user", "content": [{"type": "tool_result"}]}, "tool_use_id"),
        (anthropic, {"role": "assistant", "content": [NO_INPUT]}, f"{BLOCK}.input"),
        (openai_chat, {"role": "user", "content": 5}, "messages.0.content"),
        (openai_chat, {"role": "user", "content": [{"type": "smell"}]}, f"{BLOCK}.type"),
        (openai_chat, {"role": "tool", "content": "x"}, "messages.0.tool_call_id"),
        (openai_chat, {"role": "assistant", "tool_calls": [{"id": "a"}]}, "0.tool_calls.0.func"),
        (openai_responses, {"role": "user", "content": 5}, "input.0.content"),
        (openai_responses, {"role": "nobody", "content": ""}, "input.0.role"),
        (openai_responses, {"role": "user", "content": [{"type": "smell"}]}, "0.content.0.type"),
        (openai_responses, {"type": "function_call_output", "output": "x"}, "input.0.call_id"),
        (openai_responses, {"type": "function_call", "call_id": "a", "name": "b"}, "0.arguments"),
        (openai_responses, {"type": "item_reference", "id": "x"}, "input.0"),
    ],
)
def test_a_malformed_item_is_refused_by_its_place(
    dialect: ModuleType, item: Any, place: str
) -> None:
    name = "input" if dialect is openai_responses else "messages"
    with pytest.raises(GatewayError, match=place):
        dialect.build().parse({"model": "m", name: [item]})
