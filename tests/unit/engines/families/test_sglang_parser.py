"""SGLang's parsers behind a family, and how they differ from swerl's own.

Set SWERL_SGLANG_PYTHON to an interpreter with SGLang; `nox -s integration` makes one.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swerl.core import plugins
from swerl.core.contracts import ParserChoice
from swerl.core.errors import EngineError, InputError
from swerl.engines.families import _calls
from swerl.engines.families._calls import CallForm, SglangParser, read_calls
from swerl.engines.families._tokenizer import load_tokenizer

XML = "<tool_call>\n<function=bash>\n<parameter=cmd>\n{}\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{{"name": "bash", "arguments": {{"cmd": {}}}}}\n</tool_call>'
PAIRS = "<tool_call>bash\n<arg_key>cmd</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
KIMI = (
    "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
    '<|tool_call_argument_begin|>{"cmd": "ls"}<|tool_call_end|><|tool_calls_section_end|>'
)
MINIMAX = (
    'Look.<minimax:tool_call>\n<invoke name="bash">\n<parameter name="cmd">ls</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
DEEPSEEK = (
    "Look.<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>bash\n"
    '```json\n{"cmd": "ls"}\n```<|tool_call_end|><|tool_calls_end|>'
).translate({ord("|"): "\uff5c", ord("_"): "\u2581"})
ALIKE = {
    "one call": ("Look.\n{}", ("ls",)),
    "two calls": ("{}\n{}", ("ls", "pwd")),
    "no call": ("Done.", ()),
    "many lines": ("{}", ("a\nb\n  c",)),
    "other letters": ("{}", ("echo é 漢 😀",)),
}
"""Replies that both read alike: a text with a place for each call, and the calls' arguments."""

DIFFERENT = {
    "cut": ("qwen3_coder", CallForm.XML, XML.format("ls")[:-40], (0, 1), (1, 0)),
    "no closing tags": ("qwen3_coder", CallForm.XML, XML.format("ls")[:-12], (0, 1), (1, 0)),
    "no line breaks": (
        "qwen3_coder", CallForm.XML, XML.format("ls").replace("\n", ""), (0, 1), (1, 0),
    ),
    "good, then broken": (
        "qwen25", CallForm.JSON, JSON.format('"ls"') + "\n<tool_call>\nx\n</tool_call>",
        (1, 1), (1, 0),
    ),
    "one line": ("qwen25", CallForm.JSON, JSON.format('"ls"').replace("\n", ""), (1, 0), (0, 0)),
    "raw line break": ("qwen25", CallForm.JSON, JSON.format('"a\nb"'), (1, 0), (0, 1)),
    "arguments as a string": (
        "qwen25", CallForm.JSON,
        '<tool_call>\n{"name": "bash", "arguments": "{}"}\n</tool_call>', (1, 0), (0, 1),
    ),
    "no arguments": ("glm45", CallForm.PAIRS, "<tool_call>bash</tool_call>", (1, 0), (0, 1)),
    "no value": (
        "glm45", CallForm.PAIRS, "<tool_call>bash\n<arg_key>c</arg_key>\n</tool_call>",
        (0, 1), (1, 0),
    ),
}  # fmt: skip
"""Replies that are read differently: parser, form, text, and calls and malformed ones of each."""


@pytest.fixture(scope="module")
def python() -> Path:
    found = os.environ.get("SWERL_SGLANG_PYTHON")
    if not found:
        pytest.skip("SWERL_SGLANG_PYTHON is empty; nox -s integration sets it")
    return Path(found)


@pytest.fixture(scope="module")
def parser(python: Path) -> Callable[[str], SglangParser]:
    return functools.cache(lambda name: SglangParser(ParserChoice(f"sglang:{name}", python)))


@pytest.fixture(params=["qwen3_coder", "qwen25", "glm45"])
def both(
    request: pytest.FixtureRequest, parser: Callable[[str], SglangParser]
) -> Iterator[tuple[CallForm, SglangParser, Callable[[str], str]]]:
    form, shape = {
        "qwen3_coder": (CallForm.XML, XML.format),
        "qwen25": (CallForm.JSON, lambda value: JSON.format(json.dumps(value))),
        "glm45": (CallForm.PAIRS, PAIRS.format),
    }[request.param]
    yield form, parser(request.param), shape


@pytest.mark.parametrize("case", ALIKE)
def test_well_formed_replies_are_read_as_swerl_reads_them(
    both: tuple[CallForm, SglangParser, Callable[[str], str]], case: str
) -> None:
    form, sglang, shape = both
    text, values = ALIKE[case]
    whole = text.format(*map(shape, values))
    _, theirs = sglang.read(whole, thinking_opened=False)
    ours = read_calls(whole, form)
    assert theirs.calls == ours.calls == tuple(("bash", {"cmd": value}) for value in values)
    assert theirs.text.strip() == ours.text.strip()
    assert theirs.num_malformed == ours.num_malformed == 0


@pytest.mark.parametrize(
    ("name", "form", "text"),
    [
        ("qwen25", CallForm.JSON, '<tool_call>\n{"name": "bash", "argu\n</tool_call>'),
        ("qwen25", CallForm.JSON, "<tool_call>\nbash ls\n</tool_call>"),
        ("glm45", CallForm.PAIRS, "<tool_call></tool_call>"),
    ],
)
def test_what_neither_can_read_stays_text_and_is_counted(
    parser: Callable[[str], SglangParser], name: str, form: CallForm, text: str
) -> None:
    _, theirs = parser(name).read(text, thinking_opened=False)
    ours = read_calls(text, form)
    assert (theirs.calls, theirs.num_malformed) == (ours.calls, ours.num_malformed) == ((), 1)
    assert theirs.text == ours.text == text


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_differences_are_those_that_the_docs_list(
    parser: Callable[[str], SglangParser], case: str
) -> None:
    name, form, text, ours, theirs = DIFFERENT[case]
    read = read_calls(text, form)
    _, found = parser(name).read(text, thinking_opened=False)
    assert (len(read.calls), read.num_malformed) == ours
    assert (len(found.calls), found.num_malformed) == theirs


@pytest.mark.parametrize(
    ("name", "text"), [("kimi_k2", KIMI), ("minimax-m2", MINIMAX), ("deepseekv3", DEEPSEEK)]
)
def test_model_lines_without_a_reader_of_ours_are_read(
    parser: Callable[[str], SglangParser], name: str, text: str
) -> None:
    _, found = parser(name).read(text, thinking_opened=False)
    assert (found.text.strip(), found.calls) == ("Look.", (("bash", {"cmd": "ls"}),))


def test_thinking_is_read_by_the_parser_that_is_named(
    parser: Callable[[str], SglangParser],
) -> None:
    thinking, found = parser("deepseekv3+deepseek-r1").read(
        "Hm.</think>" + DEEPSEEK, thinking_opened=True
    )
    assert (thinking.strip(), len(found.calls)) == ("Hm.", 1)


@pytest.mark.parametrize("template", ["Kimi-K2-Thinking", "MiniMax-M2", "deepseekv3"])
def test_a_template_of_unknown_form_is_read_where_a_parser_is_named(
    shared_dir: Path, tmp_path: Path, python: Path, template: str
) -> None:
    name, text = {
        "Kimi-K2-Thinking": ("kimi_k2", KIMI),
        "MiniMax-M2": ("minimax-m2", MINIMAX),
        "deepseekv3": ("deepseekv3", DEEPSEEK),
    }[template]
    model = _model(shared_dir, tmp_path, template)
    with pytest.raises(InputError, match="not known here"):
        plugins.family("template", model)
    family = plugins.family("template", model, ParserChoice(f"sglang:{name}", python))
    reply = family.parse(load_tokenizer(model).encode([f"<think>Hm.</think>{text}"]))
    assert (reply.thinking, reply.text.strip()) == ("Hm.", "Look.")
    assert reply.calls == (("bash", {"cmd": "ls"}),)


def test_an_unknown_parser_is_one_error_that_lists_the_known_ones(python: Path) -> None:
    with pytest.raises(InputError, match=r"none of SGLang's tool call parsers.*kimi_k2"):
        SglangParser(ParserChoice("sglang:kimi", python))


def test_an_interpreter_without_sglang_is_one_error() -> None:
    with pytest.raises(InputError, match="has no SGLang") as caught:
        SglangParser(ParserChoice("sglang:kimi_k2", Path(sys.executable)))
    assert "model.parser_python" in caught.value.hint


def test_an_interpreter_that_is_not_there_is_one_error() -> None:
    with pytest.raises(InputError, match="cannot be run"):
        SglangParser(ParserChoice("sglang:kimi_k2", Path("/no/such/python")))


def test_a_family_with_a_reader_of_its_own_takes_no_parser() -> None:
    with pytest.raises(InputError, match="tiny cannot be read"):
        plugins.family("tiny", None, ParserChoice("sglang:kimi_k2"))


def _model(shared_dir: Path, folder: Path, template: str) -> Path:
    tokenizers = shared_dir / "tokenizers"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizers / "qwen3" / name, folder)
    (folder / "chat_template.jinja").write_text(
        (tokenizers / "templates" / f"{template}.jinja").read_text()
    )
    return folder


def test_a_stopped_parser_is_named_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_calls, "PARSE_S", 0.2)
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\necho '{}'\nexec sleep 600\n")
    silent.chmod(0o755)
    parser = SglangParser(ParserChoice("sglang:qwen25", silent))

    with pytest.raises(EngineError, match=r"parsers .process \d+. did not answer within 0.2 s"):
        parser.read("hi", thinking_opened=False)

    assert parser._process.poll() is not None
    with pytest.raises(EngineError):
        parser.read("hi", thinking_opened=False)
