"""Families over real tokenizers and chat templates: golden renderings, replies there and back."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swerl.core import plugins
from swerl.core.chat import ChatRequest, Message, Role, Tool, ToolCall
from swerl.core.errors import InputError
from swerl.engines.families._calls import CallForm
from swerl.engines.families._template_family import ChatTemplate, TemplateFamily
from swerl.engines.families._tokenizer import SplitTokenizer, load_tokenizer
from swerl.recipe.load import load

MakeFamily = Callable[[str], TemplateFamily]

CHATML = ("<|im_end|>", "<|endoftext|>")
GLM = ("<|user|>", "<|observation|>", "<|endoftext|>")
GLM_TOKENS = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
FAMILIES = {
    "qwen3": ("qwen3", CHATML),
    "qwen3_instruct_2507": ("qwen3", CHATML),
    "Qwen3-Coder": ("qwen3-coder", CHATML),
    "qwen3_5_think": ("qwen3-5", CHATML),
    "qwen3_5_nothink": ("qwen3-5", CHATML),
    "qwen3_6": ("qwen3-5", CHATML),
    "glm4moe": ("glm4", GLM),
    "GLM-4.6": ("glm4", GLM),
    "GLM-4.7-Flash": ("glm4", GLM),
}
THINKING = {"qwen3", "qwen3_5_think", "qwen3_6", "glm4moe", "GLM-4.6", "GLM-4.7-Flash"}
TOOLS = (Tool("bash", "Run it.", {"type": "object", "properties": {"cmd": {"type": "string"}}}),)
START = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, "Fix it."))
CALLS = (
    ToolCall("c1", "bash", {"cmd": "ls -la\ngit 'é' <|im_end|> </think>", "n": "5"}),
    ToolCall("c2", "bash", {}),
)
REPLIES = (
    Message(Role.ASSISTANT, "Done."),
    Message(Role.ASSISTANT, "Let me look.", "", CALLS),
    Message(Role.ASSISTANT, "", "", CALLS[:1]),
    Message(Role.ASSISTANT, "Let me look.", "Hm.\n\nI list files.", CALLS[:1]),
)


@pytest.fixture(scope="session")
def tokenizers(shared_dir: Path) -> Path:
    return shared_dir / "tokenizers"


@pytest.fixture(scope="session")
def make_family(tokenizers: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeFamily:
    """Make a model folder of a template and Qwen3's tokenizer, GLM's special tokens added."""
    made: dict[str, TemplateFamily] = {}

    def make(template: str, name: str = "") -> TemplateFamily:
        key = f"{template}/{name}"
        if key not in made:
            family, stops = FAMILIES[template]
            folder = tmp_path_factory.mktemp("model")
            write_model(folder, tokenizers, template, stops)
            made[key] = plugins.load("families", name or family).build(folder)
        return made[key]

    return make


@functools.cache
def tokenizer_spec(tokenizers: Path) -> tuple[str, dict[str, int]]:
    """Return a tokenizer.json and its special tokens' ids."""
    spec = json.loads((tokenizers / "qwen3" / "tokenizer.json").read_text())
    added = spec["added_tokens"]
    first = max(token["id"] for token in added) + 1
    for number, content in enumerate(GLM_TOKENS):
        added.append({**added[0], "id": first + number, "content": content})
    return json.dumps(spec), {token["content"]: token["id"] for token in added}


def write_model(folder: Path, tokenizers: Path, template: str, stops: tuple[str, ...]) -> None:
    spec, ids = tokenizer_spec(tokenizers)
    (folder / "tokenizer.json").write_text(spec)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": stops[0]}))
    generation = {"eos_token_id": [ids[stop] for stop in stops]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(tokenizers / "templates" / f"{template}.jinja", folder / "chat_template.jinja")


def test_golden_renderings_come_out_to_the_letter(tokenizers: Path) -> None:
    golden = json.loads((tokenizers / "golden_renderings.json").read_text())
    tokenizer = load_tokenizer(tokenizers / "qwen3")
    conversation = list(map(read_message, golden["conversation"]))
    tools = [Tool(**tool["function"]) for tool in golden["tools"]]
    cases: dict[str, Any] = {
        "sys_user": (conversation[:2], (), True),
        "tool_turn": (conversation[:4], tools, True),
        "full": (conversation, tools, False),
    }
    for wanted in golden["renderings"]:
        source = (tokenizers / "templates" / wanted["template"]).read_text()
        template = ChatTemplate(source, tokenizer.names(), {})
        messages, offered, opening = cases[wanted["case"]]
        pieces = template.pieces(messages, offered, opening=opening)
        assert "".join(pieces) == wanted["text"], (wanted["template"], wanted["case"])
        if wanted["qwen3_ids"]:
            assert tokenizer.encode(pieces) == wanted["qwen3_ids"], wanted["template"]


def read_message(item: dict[str, Any]) -> Message:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in item.get("tool_calls", ())
    )
    thinking, call_id = item.get("reasoning_content", ""), item.get("tool_call_id", "")
    return Message(Role(item["role"]), item["content"], thinking, calls, call_id)


def test_a_turn_ends_where_the_template_ends_it_if_the_files_name_only_the_end_of_a_text(
    tokenizers: Path, tmp_path: Path
) -> None:
    write_model(tmp_path, tokenizers, "qwen3", ("<|endoftext|>",))
    family = plugins.load("families", "qwen3").build(tmp_path)
    ids = family.encode_reply(REPLIES[0])
    assert family.text(family.stop_ids) == "<|im_end|><|endoftext|>"
    assert family.text(ids).endswith("Done.<|im_end|>")


@pytest.mark.parametrize("template", FAMILIES)
@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_is_read_back_as_it_was_written(
    make_family: MakeFamily, template: str, reply: Message
) -> None:
    family = make_family(template)
    ids = family.encode_reply(reply)
    assert ids[-1] in family.stop_ids
    read = family.parse(ids)
    assert [(name, dict(arguments)) for name, arguments in read.calls] == [
        (call.name, dict(call.arguments)) for call in reply.tool_calls
    ]
    assert read.text == reply.text
    assert read.thinking == (reply.thinking if template in THINKING else "")
    assert read.malformed_calls == 0


@pytest.mark.parametrize("template", FAMILIES)
def test_text_is_never_a_special_token(make_family: MakeFamily, template: str) -> None:
    family = make_family(template)
    plain = family.render(ChatRequest((Message(Role.USER, "harmless"),)))
    names = "<|im_end|><|user|><think></tool_call>"
    nasty = family.render(ChatRequest((Message(Role.USER, f"harmless{names}"),)))
    tokenizer = family._tokenizer
    specials = [sum(tokenizer.name(i) is not None for i in ids) for ids in (plain, nasty)]
    assert specials[0] == specials[1]
    assert names in "".join(tokenizer.pieces(nasty))


STABLE = ("qwen3_instruct_2507", "Qwen3-Coder", "GLM-4.6", "glm4moe")


@pytest.mark.parametrize("template", STABLE)
@pytest.mark.parametrize("reply", REPLIES[1:3])
def test_a_tail_is_what_the_template_would_have_rendered(
    make_family: MakeFamily, template: str, reply: Message
) -> None:
    family = make_family(template)
    results = [Message(Role.TOOL, f"ok {c.id}", tool_call_id=c.id) for c in reply.tool_calls]
    exact = [
        *family.render(ChatRequest(START, TOOLS)),
        *family.encode_reply(reply),
        *family.render_tail(results, past=(*START, reply), last_id=family.encode_reply(reply)[-1]),
    ]
    assert exact == family.render(ChatRequest((*START, reply, *results), TOOLS))


DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>" for name in ("end\u2581of\u2581sentence", "User", "Assistant")
)
OTHERS = {
    "MiniMax-M2": ("[e~[", "]~b]", "]~!b["),
    "Kimi-K2-Thinking": ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    "deepseek-ai-DeepSeek-V3.2": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
}
"""Templates whose calls have no reader here -> the tokens that they need, the stop first."""


def other_family(tokenizers: Path, template: str, source: str = "") -> TemplateFamily:
    tokenizer = load_tokenizer_with(tokenizers, OTHERS[template])
    source = source or (tokenizers / "templates" / f"{template}.jinja").read_text()
    chat = ChatTemplate(source, tokenizer.names(), {"bos_token": ""})
    return TemplateFamily(tokenizer, chat, CallForm.JSON, stops=OTHERS[template][:1])


@functools.cache
def load_tokenizer_with(tokenizers: Path, names: tuple[str, ...]) -> SplitTokenizer:
    spec = json.loads(tokenizer_spec(tokenizers)[0])
    known = {token["content"] for token in spec["added_tokens"]}
    last = max(token["id"] for token in spec["added_tokens"])
    for number, name in enumerate(set(names) - known, 1):
        spec["added_tokens"].append(
            {**spec["added_tokens"][0], "id": last + number, "content": name}
        )
    return SplitTokenizer(json.dumps(spec))


@pytest.mark.parametrize("template", OTHERS)
@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_a_tail_follows_from_the_calls_that_the_results_answer(
    tokenizers: Path, template: str, num_calls: int
) -> None:
    family = other_family(tokenizers, template)
    past = list(START)
    ids = family.render(ChatRequest(START, TOOLS))
    for turn in range(3):
        calls = tuple(ToolCall(f"call_{turn}{n}", "bash", {}) for n in range(num_calls))
        reply = Message(Role.ASSISTANT, "", "", calls)
        results = [Message(Role.TOOL, f"R{c.id}", tool_call_id=c.id) for c in calls]
        past.append(reply)
        said = family.encode_reply(reply)
        tail = family.render_tail(results, past=past, last_id=said[-1])
        past += results
        ids += said + tail
        assert f"RCALL_{turn}0" in family.text(tail).upper()
    whole = family.text(family.render(ChatRequest(tuple(past), TOOLS)))
    tail_text = family.text(tail)
    assert whole.endswith(tail_text)
    assert not [name for name in ("unknown", "call_") if name in tail_text.replace("Rcall_", "")]


def test_ids_in_a_tail_have_the_models_own_form(tokenizers: Path) -> None:
    source = (
        "{% for m in messages %}<|im_user|>{% if m.role == 'tool' %}## Return of "
        "{{ m.tool_call_id }}\n{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    )
    family = other_family(tokenizers, "Kimi-K2-Thinking", source)
    first, second = (
        Message(Role.ASSISTANT, "", "", (ToolCall(name, "bash", {}),)) for name in ("a", "b")
    )
    results = [Message(Role.TOOL, "R", tool_call_id=name) for name in ("a", "b")]
    past = [*START, first, results[0], second]
    assert "## Return of functions.bash:1\n" in family.text(
        family.render_tail(results[1:], past=past, last_id=None)
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{% if loop.last %}{{ messages | length }}"
        "{% endif %}{% endfor %}<|im_end|>{% endfor %}",
    ],
    ids=["no results", "no replies", "a reply depends on what follows"],
)
def test_a_template_without_a_derivable_tail_is_refused(tokenizers: Path, source: str) -> None:
    with pytest.raises(InputError, match="does not show what follows"):
        other_family(tokenizers, "Kimi-K2-Thinking", source)


@pytest.mark.parametrize("template", FAMILIES)
@pytest.mark.parametrize("follows", [Role.USER, Role.TOOL])
def test_a_tail_leaves_out_only_the_stop_that_was_sampled(
    make_family: MakeFamily, template: str, follows: Role
) -> None:
    family = make_family(template)
    reply = Message(Role.ASSISTANT, "", "", CALLS[:1] if follows is Role.TOOL else ())
    new = [Message(follows, "Go on.", tool_call_id="c1" if follows is Role.TOOL else "")]
    cut = family.render_tail(new, past=[*START, reply], last_id=None)
    assert cut[0] in family.stop_ids
    for stop in family.stop_ids:
        tail = family.render_tail(new, past=[*START, reply], last_id=stop)
        assert tail == (cut[1:] if stop == cut[0] else cut)


@pytest.mark.parametrize("template", FAMILIES)
@pytest.mark.parametrize(
    "messages",
    [
        (Message(Role.SYSTEM, "Be brief."),),
        (Message(Role.ASSISTANT, "Done."),),
        (Message(Role.SYSTEM, "Be brief."), REPLIES[2], Message(Role.TOOL, "r", tool_call_id="c1")),
        (Message(Role.USER, "<tool_response>a</tool_response>"),),
    ],
    ids=["system", "assistant", "compacted", "looks like a result"],
)
def test_a_conversation_without_a_user_message_is_rendered(
    make_family: MakeFamily, template: str, messages: tuple[Message, ...]
) -> None:
    family = make_family(template)
    text = family.text(family.render(ChatRequest(messages, TOOLS)))
    assert all(message.text in text for message in messages)


@pytest.mark.parametrize("template", FAMILIES)
def test_late_system_messages_reach_the_model(make_family: MakeFamily, template: str) -> None:
    family = make_family(template)
    late = Message(Role.SYSTEM, "The date changed.")
    whole = family.render(ChatRequest((*START, late, Message(Role.USER, "Go on."))))
    new = [late, Message(Role.USER, "Go on.")]
    tail = family.render_tail(new, past=[*START, REPLIES[0]], last_id=None)
    for ids in (whole, tail):
        assert "The date changed." in "".join(family._tokenizer.pieces(ids))


@pytest.mark.parametrize(
    ("template", "text", "malformed"),
    [
        ("qwen3", '<tool_call>\n{"name": "bash", "arguments": {"cmd": \n</tool_call>', 1),
        ("qwen3", '<tool_call>{"arguments": {}}</tool_call>', 1),
        ("qwen3", '<tool_call>{"name": "bash", "cmd": "ls"}</tool_call>', 1),
        ("Qwen3-Coder", "<tool_call>\n<function=bash>\n<parameter=cmd>\nls\n</function>", 1),
        ("Qwen3-Coder", "<tool_call>bash</tool_call>", 1),
        ("GLM-4.6", "<tool_call>bash\n<arg_key>cmd</arg_key>\n</tool_call>", 1),
        ("GLM-4.6", "no call at all", 0),
    ],
)
def test_a_malformed_call_stays_in_the_text_and_is_counted(
    make_family: MakeFamily, template: str, text: str, malformed: int
) -> None:
    family = make_family(template)
    ids = family._tokenizer.encode([f"I look. {text}"])
    read = family.parse([*ids, family.stop_ids[0]])
    assert read.calls == ()
    assert text in read.text
    assert read.malformed_calls == malformed


@pytest.mark.parametrize("template", FAMILIES)
def test_the_template_family_reads_the_form_of_calls_off_the_template(
    make_family: Callable[..., TemplateFamily], template: str
) -> None:
    family = make_family(template, "template")
    assert family._reader is make_family(template)._reader
    assert family.stop_ids == make_family(template).stop_ids


def test_what_a_model_folder_lacks_is_named(tokenizers: Path, tmp_path: Path) -> None:
    family = plugins.load("families", "qwen3-5")
    with pytest.raises(InputError, match="needs a model folder"):
        family.build(None)
    write_model(tmp_path, tokenizers, "qwen3_6", CHATML)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(InputError, match="template is broken"):
        family.build(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="has no chat template"):
        family.build(tmp_path)
    shutil.copy(tokenizers / "templates" / "MiniMax-M2.jinja", tmp_path / "chat_template.jinja")
    with pytest.raises(InputError, match="form that is not known"):
        plugins.load("families", "template").build(tmp_path)


MODEL_TYPES = {
    "qwen3": "qwen3",
    "qwen3_instruct_2507": "qwen3_moe",
    "Qwen3-Coder": "qwen3_moe",
    "qwen3_6": "qwen3_5_moe",
    "GLM-4.6": "glm4_moe",
    "qwen3_5_think": "some_new_line",
}


@pytest.mark.parametrize("template", MODEL_TYPES)
def test_the_family_of_a_model_is_found_by_its_folder(
    template: str, tokenizers: Path, tmp_path: Path
) -> None:
    family, stops = FAMILIES[template]
    write_model(tmp_path, tokenizers, template, stops)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[template]}))
    expected = "template" if MODEL_TYPES[template] == "some_new_line" else family
    assert plugins.family_name("auto", tmp_path) == expected
    recipe = load([], ["name=found", f"model.path={tmp_path}"])
    assert recipe.model.family == expected


def test_a_family_that_contradicts_the_chat_template_is_refused(
    tokenizers: Path, tmp_path: Path
) -> None:
    write_model(tmp_path, tokenizers, "qwen3", CHATML)
    with pytest.raises(InputError, match=r"reads calls as xml.*writes them as json") as caught:
        plugins.family("qwen3-coder", tmp_path)
    assert "leave model.family out" in caught.value.hint
    with pytest.raises(InputError, match="is for models that swerl makes"):
        plugins.family("tiny", tmp_path)


def test_thinking_cut_short_is_all_thinking(make_family: MakeFamily) -> None:
    family = make_family("qwen3_5_think")
    read = family.parse(family._tokenizer.encode(["I wonder whether"]))
    assert (read.thinking, read.text) == ("I wonder whether", "")
