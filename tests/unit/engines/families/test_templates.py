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
from swerl.engines.families import tiny
from swerl.engines.families._template_family import ChatTemplate, TemplateFamily
from swerl.engines.families._tokenizer import load_tokenizer
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
        *family.render_tail(results, closed=True),
    ]
    assert exact == family.render(ChatRequest((*START, reply, *results), TOOLS))


@pytest.mark.parametrize("template", FAMILIES)
def test_a_tail_closes_a_reply_that_was_cut(make_family: MakeFamily, template: str) -> None:
    family = make_family(template)
    asked = [Message(Role.USER, "Go on.")]
    closed = family.render_tail(asked, closed=True)
    cut = family.render_tail(asked, closed=False)
    assert cut[0] in family.stop_ids
    assert cut[1:] == closed


@pytest.mark.parametrize("template", FAMILIES)
def test_late_system_messages_reach_the_model(make_family: MakeFamily, template: str) -> None:
    family = make_family(template)
    late = Message(Role.SYSTEM, "The date changed.")
    whole = family.render(ChatRequest((*START, late, Message(Role.USER, "Go on."))))
    tail = family.render_tail([late, Message(Role.USER, "Go on.")], closed=True)
    for ids in (whole, tail):
        assert "The date changed." in "".join(family._tokenizer.pieces(ids))


@pytest.mark.parametrize(
    ("template", "text", "malformed"),
    [
        ("qwen3", '<tool_call>\n{"name": "bash", "arguments": {"cmd": \n</tool_call>', 1),
        ("qwen3", '<tool_call>\n{"name": "bash"', 1),
        ("qwen3", '<tool_call>{"arguments": {}}</tool_call>', 1),
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


def test_thinking_cut_short_is_all_thinking(make_family: MakeFamily) -> None:
    family = make_family("qwen3_5_think")
    read = family.parse(family._tokenizer.encode(["I wonder whether"]))
    assert (read.thinking, read.text) == ("I wonder whether", "")


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


def test_tiny_is_the_family_of_models_that_swerl_makes(tmp_path: Path) -> None:
    assert load([], ["name=made"]).model.family == "tiny"
    tiny.save_tokenizer(tiny.byte_tokenizer(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert load([], ["name=kept", f"model.path={tmp_path}"]).model.family == "tiny"
