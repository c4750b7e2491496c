"""The families of the package `renderers`; it is also the referee of swerl's own families."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import get_args

import pytest

from swerl.cli.main import _known
from swerl.core import plugins
from swerl.core.chat import ChatRequest, Message, Role, ToolCall
from swerl.core.errors import InputError, UnknownNameError
from swerl.engines.families._tokenizer import SplitTokenizer
from swerl.engines.families.renderers import RendererFamily, RendererTemplate
from tests.unit.engines.families import test_templates as templates
from tests.unit.engines.families.test_templates import START, TOOLS

renderers = pytest.importorskip("renderers", reason="the package renderers is not installed")
CALLS = (ToolCall("c1", "bash", {"cmd": "ls"}), ToolCall("c2", "bash", {"cmd": "pwd"}))
RESULTS = [Message(Role.TOOL, f"ok {call.id}", tool_call_id=call.id) for call in CALLS]
SAME = {
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "glm4moe": "glm-4.5",
    "GLM-4.6": "glm-4.5",
    "GLM-4.7-Flash": "glm-5",
}
"""Template of one of swerl's families -> the renderer that writes the same."""
REFUSED = {"gemma4", "gpt-oss", "llama-3"}
"""Lines whose turns go on after a call, end in another token, or have one call at most."""
OTHER_TAIL = {"deepseek-r1", "deepseek-v4", "laguna-m.1", "laguna-xs.2"}
"""Lines whose bridge refuses this reply, or leaves out the line break that they render."""
TYPES = get_args(get_args(renderers.RendererConfig)[0])
NAMES = {config.model_fields["name"].default for config in TYPES} - {"auto", "custom", "default"}
LINES = sorted(NAMES - REFUSED)


@pytest.fixture(scope="module")
def tokenizers(shared_dir: Path) -> Path:
    return shared_dir / "tokenizers"


class _Asked:
    """A tokenizer that notes the special tokens that a renderer asks for."""

    unk_token_id = None
    name_or_path = ""

    def __init__(self) -> None:
        self.names: list[str] = []

    def convert_tokens_to_ids(self, name: str) -> int:
        self.names.append(name)
        return len(self.names)

    def encode(self, text: str, **options: bool) -> list[int]:
        return [self.convert_tokens_to_ids(text)]


@functools.cache
def family(tokenizers: Path, line: str) -> RendererFamily:
    """Return a line's family over Qwen3's tokenizer and the special tokens of all lines."""
    template = RendererTemplate(_tokenizer(tokenizers), "model")
    template.renderer = renderers.create_renderer(template, renderers.config_from_name(line))
    return RendererFamily(template)


@functools.cache
def _tokenizer(tokenizers: Path) -> SplitTokenizer:
    asked = _Asked()
    for line in sorted(NAMES - {"gpt-oss"}):
        renderers.create_renderer(asked, renderers.config_from_name(line))
    spec = json.loads((tokenizers / "qwen3" / "tokenizer.json").read_text())
    added = spec["added_tokens"]
    new = sorted({*asked.names} - {token["content"] for token in added})
    first = max(token["id"] for token in added) + 1
    added += [{**added[0], "id": first + n, "content": name} for n, name in enumerate(new)]
    return SplitTokenizer(json.dumps(spec))


@pytest.mark.parametrize("template", SAME)
def test_the_package_is_the_referee_of_our_families(
    tokenizers: Path, tmp_path: Path, template: str
) -> None:
    name, stops = templates.FAMILIES[template]
    templates.write_model(tmp_path, tokenizers, template, stops)
    ours = plugins.family(name, tmp_path)
    theirs = plugins.family(f"renderers:{SAME[template]}", tmp_path)
    call = ToolCall("c1", "bash", {"cmd": "ls 'é' <|im_end|> </think>"})
    for thinking in ("", "Hm.\n\nI list files."):
        reply = Message(Role.ASSISTANT, "Let me look.", thinking, (call,))
        result = Message(Role.TOOL, "ok <|im_end|><|user|> </tool_response>", tool_call_id="c1")
        past = (*START, reply)
        for request in (ChatRequest(START, TOOLS), ChatRequest((*past, result), TOOLS)):
            assert ours.render(request) == theirs.render(request)
        said = ours.encode_reply(reply)
        assert theirs.encode_reply(reply) == said
        for last in (said[-1], None):
            tail = ours.render_tail([result], past=past, last_id=last)
            assert theirs.render_tail([result], past=past, last_id=last) == tail
        mine, read = ours.parse(said, TOOLS), theirs.parse(said, TOOLS)
        assert (read.text, read.thinking, read.malformed_calls) == (mine.text, mine.thinking, 0)
        assert [(name, dict(arguments)) for name, arguments in read.calls] == [
            (call.name, dict(call.arguments))
        ]


@pytest.mark.parametrize("line", LINES)
def test_a_tail_is_what_the_packages_own_bridge_appends(tokenizers: Path, line: str) -> None:
    chosen = family(tokenizers, line)
    reply = Message(Role.ASSISTANT, "Look.", "", CALLS)
    prompt = chosen.render(ChatRequest(START, TOOLS))
    said = chosen.encode_reply(reply)
    tail = chosen.render_tail(RESULTS, past=(*START, reply), last_id=said[-1])
    assert all(result.text in chosen.text(tail) for result in RESULTS)
    assert said[-1] in chosen.stop_ids and not {*said[:-1]} & {*chosen.stop_ids}
    if line in OTHER_TAIL:
        return
    results = [
        {"role": "tool", "content": r.text, "tool_call_id": f"functions.bash:{n}", "name": "bash"}
        for n, r in enumerate(RESULTS)
    ]
    bridge = chosen._renderer.bridge_to_next_turn(prompt, said, results)
    assert bridge.token_ids == [*prompt, *said, *tail]


@pytest.mark.parametrize("line", LINES)
def test_text_is_never_a_special_token(tokenizers: Path, line: str) -> None:
    chosen = family(tokenizers, line)
    tokenizer = chosen._tokenizer
    names = " ".join(tokenizer.names())
    call = ToolCall("c1", "bash", {"cmd": "ls"})
    past = (*START, Message(Role.ASSISTANT, "Look.", "", (call,)))
    counts = []
    for text in ("harmless", f"harmless {names}."):
        result = Message(Role.TOOL, text, tool_call_id="c1")
        ids = chosen.render(ChatRequest((Message(Role.USER, text),), TOOLS))
        ids += chosen.render_tail([result], past=past, last_id=None)
        counts.append(sum(tokenizer.name(index) is not None for index in ids))
    assert counts[0] == counts[1]
    assert chosen.text(ids).count(names) == 2


def test_a_malformed_call_stays_text_and_is_counted(tokenizers: Path) -> None:
    chosen = family(tokenizers, "qwen3")
    pieces = chosen._template.split('Look.<tool_call>{"name": </tool_call>')
    ids = chosen._tokenizer.encode(pieces)
    read = chosen.parse([*ids, chosen.stop_ids[0]], TOOLS)
    assert (read.calls, read.malformed_calls) == ((), 1)
    assert "Look." in read.text and '{"name":' in read.text


def test_what_does_not_fit_is_one_error(
    tokenizers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in REFUSED - {"gpt-oss"}:
        with pytest.raises(InputError):
            family(tokenizers, line)
    templates.write_model(tmp_path, tokenizers, "qwen3", templates.CHATML)
    for name in ("renderers:qwen9", "renderers", "renderers:"):
        with pytest.raises(UnknownNameError) as caught:
            plugins.family(name, tmp_path)
        assert all(line in caught.value.hint for line in LINES)
    with pytest.raises(InputError, match="kimi-k2 does not fit"):
        plugins.family("renderers:kimi-k2", tmp_path)
    with pytest.raises(InputError, match="needs a model folder"):
        plugins.family("renderers:qwen3", None)
    with pytest.raises(UnknownNameError):
        plugins.family("qwen3:hybrid", tmp_path)
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ModuleNotFoundError) as missing:
        plugins.family("renderers:qwen3", tmp_path)
    reported = _known(missing.value)
    assert reported is not None and "[renderers]" in reported.hint
