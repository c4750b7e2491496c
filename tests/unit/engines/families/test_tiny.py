"""What the tiny family renders, it reads back; what it appends is what it would have rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swerl.core.chat import ChatRequest, Message, Role, ToolCall
from swerl.core.errors import InputError
from swerl.engines.families import tiny
from swerl.engines.families.tiny import (
    SPECIAL_TOKENS,
    save_tokenizer,
    train_tokenizer,
)

FAMILY = tiny.build(None)
NAMES = st.sampled_from(["bash", "str_replace", "submit"])
TEXTS = st.text(max_size=20)
VALUES = st.one_of(TEXTS, st.sampled_from(["a\nb\n", "\n", "", " </parameter>", "<|im_end|>"]))
CALLS = st.builds(
    ToolCall,
    id=st.just(""),
    name=NAMES,
    arguments=st.dictionaries(st.sampled_from(["path", "old", "new"]), VALUES, max_size=3),
)
REPLIES = st.builds(
    Message,
    role=st.just(Role.ASSISTANT),
    text=TEXTS,
    thinking=TEXTS,
    tool_calls=st.lists(CALLS, max_size=3).map(tuple),
)
USERS = st.builds(Message, role=st.just(Role.USER), text=TEXTS)
RESULTS = st.builds(Message, role=st.just(Role.TOOL), text=TEXTS, tool_call_id=st.just("x"))
NEWS = st.lists(st.one_of(USERS, RESULTS), min_size=1, max_size=3)


def text_of(ids: list[int]) -> str:
    return "".join(FAMILY._tokenizer.pieces(ids))


@given(REPLIES)
@settings(max_examples=200, deadline=None)
def test_a_reply_is_read_back_as_it_was_written(reply: Message) -> None:
    ids = FAMILY.encode_reply(reply)

    parsed = FAMILY.parse(ids)

    assert ids[-1] in FAMILY.stop_ids
    # Templates put line breaks around thinking, and blanks before calls.
    assert parsed.thinking == reply.thinking.strip("\n")
    assert parsed.text == (reply.text.rstrip() if reply.tool_calls else reply.text)
    assert parsed.calls == tuple((call.name, call.arguments) for call in reply.tool_calls)
    assert parsed.malformed_calls == 0


@given(st.lists(st.tuples(NEWS, REPLIES), min_size=1, max_size=3), NEWS, st.booleans())
@settings(max_examples=100, deadline=None)
def test_appending_gives_what_rendering_anew_gives(
    turns: list[tuple[list[Message], Message]], news: list[Message], closed: bool
) -> None:
    messages = [m for new, reply in turns for m in (*new, reply)]
    *before, last = messages
    reply_ids = FAMILY.encode_reply(last)
    known = FAMILY.render(ChatRequest(tuple(before))) + (reply_ids if closed else reply_ids[:-1])

    tail = FAMILY.render_tail(news, past=messages, last_id=known[-1])

    assert known + tail == FAMILY.render(ChatRequest((*messages, *news)))
    assert closed or tail[0] in FAMILY.stop_ids


@given(st.sampled_from(SPECIAL_TOKENS), st.sampled_from([Role.USER, Role.TOOL]))
def test_a_special_tokens_name_in_what_the_client_says_stays_text(name: str, role: Role) -> None:
    plain = FAMILY.render(ChatRequest((Message(role, "x"),)))
    specials = {FAMILY._tokenizer.id(token) for token in SPECIAL_TOKENS}

    ids = FAMILY.render(ChatRequest((Message(role, f"x{name}"),)))

    assert sum(i in specials for i in ids) == sum(i in specials for i in plain)
    assert f"x{name}" in text_of(ids)


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Fix it."},
    {
        "role": "assistant",
        "content": "I see.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"function": {"name": "bash", "arguments": {"command": "ls", "n": 3}}},
            {"function": {"name": "bash", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
    {"role": "user", "content": "Well?"},
]
MESSAGES = (
    Message(Role.SYSTEM, "Be brief."),
    Message(Role.USER, "Fix it."),
    Message(
        Role.ASSISTANT,
        "I see.",
        "Hm.",
        (ToolCall("1", "bash", {"command": "ls", "n": 3}), ToolCall("2", "bash", {})),
    ),
    Message(Role.TOOL, "a", tool_call_id="1"),
    Message(Role.TOOL, "b", tool_call_id="2"),
    Message(Role.USER, "Well?"),
)


def test_a_saved_tokenizer_renders_the_same_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    words = [text_of(FAMILY.render(ChatRequest(MESSAGES)))] * 3
    save_tokenizer(train_tokenizer(words, 300), tmp_path)
    family = tiny.build(tmp_path)

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)

    ours = family.render(ChatRequest(MESSAGES))
    assert text == text_of(FAMILY.render(ChatRequest(MESSAGES)))
    assert theirs.convert_ids_to_tokens(ours[0]) == "<|im_start|>"
    assert theirs.decode(ours) == text


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        tiny.build(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        tiny.build(tmp_path)


def test_a_tokenizer_of_another_family_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())
    with pytest.raises(InputError, match="is for models that swerl makes"):
        tiny.build(tmp_path)
