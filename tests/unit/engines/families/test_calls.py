"""Reading calls in whatever a model says: never slow, never an error, never what no wire takes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from types import FrameType

import orjson
import pytest

from swerl.core.chat import Tool
from swerl.engines.families._calls import CallForm, read_calls

MANY = 100_000
"""Repetitions. A reader that looks back at each of them would need an hour or more."""
GIVEN_UP_S = 120


@pytest.fixture(autouse=True)
def _given_up() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the reply is still being read")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(GIVEN_UP_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize("form", CallForm)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * MANY,
        call("<tool_call>" * MANY),
        call("\n<function=f>\n" + "<parameter=x>\n" * MANY + "</function>\n"),
        call("\n<function=f>\n" + "<parameter=x>\na\n</parameter>\nb" * MANY + "</function>\n"),
        call("\n<function=f>\n" + "</function>\n" * MANY + "b"),
        call("f\n" + "<arg_key>" * MANY),
        call("f\n" + "<arg_key>k</arg_key><arg_value>" * MANY),
        call("f\n<arg_key>k</arg_key>" + "\n" * MANY + "b"),
        call("[" * MANY),
        call('{"name": "f", "arguments": {"a": ' + "[" * MANY + "]" * MANY + "}}"),
        call('{"name":' * MANY),
    ],
    ids=range(11),
)
def test_a_model_that_repeats_itself_is_read_in_linear_time(form: CallForm, text: str) -> None:
    found = read_calls(text, form)
    assert found.num_malformed + len(found.calls) == 1


@pytest.mark.integration
@pytest.mark.parametrize("form", CallForm)
@pytest.mark.parametrize(
    "text",
    [
        "a <tool_call> b",
        "</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n</tool_call>\n",
        "<tool_call>\n<function=f>\n<parameter=x>\n</parameter>\n",
        "<tool_call>f\n<arg_key>k</arg_key><arg_value>",
        "<tool_call>{bad</tool_call>\n",
        '{"name": [',
    ],
)
def test_repeated_tags_without_their_calls_are_read_in_linear_time(
    form: CallForm, text: str
) -> None:
    read_calls(text * MANY, form)


BASH = (Tool("Bash", parameters={"properties": {"command": {"type": "string"}}}),)
LS = {
    CallForm.JSON: '{"name": "Bash", "arguments": {"command": "ls"}}',
    CallForm.XML: "<function=Bash>\n<parameter=command>\nls\n</parameter>\n</function>",
    CallForm.PAIRS: "Bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>",
}
READ = {
    "opening tag left out": ("I look.\n{}\n</tool_call>", 1, 0),
    "both tags left out": ("I look.\n{}", 1, 0),
    "second opening tag left out": ("<tool_call>\n{}\n</tool_call>\n{}\n</tool_call>", 2, 0),
    "one unreadable": ("<tool_call>\n{{\n</tool_call>\n<tool_call>\n{}\n</tool_call>", 1, 1),
    "closing tag left out": ("<tool_call>\n{}", 0, 1),
    "nothing but an end": ("ls\n</tool_call>", 0, 1),
    "only an opening tag": ("I look.\n<tool_call>", 0, 1),
    "prose about a tag": ("Write <tool_call> before each call.", 0, 0),
    "prose about both tags": ("It stands between <tool_call> and </tool_call>.", 0, 0),
    "prose about code": ("Put `<tool_call></tool_call>` around <function=NAME>.", 0, 0),
    "other JSON": ('package.json has {{"name": "Bash", "version": 1}}.', 0, 0),
}


@pytest.mark.parametrize("form", CallForm)
@pytest.mark.parametrize(("text", "num_calls", "num_malformed"), READ.values(), ids=READ)
def test_a_call_is_read_or_counted_and_prose_is_neither(
    form: CallForm, text: str, num_calls: int, num_malformed: int
) -> None:
    if form is CallForm.PAIRS and text == READ["both tags left out"][0]:
        num_calls, num_malformed = 0, 1  # nothing shows where it ends
    found = read_calls(text.format(LS[form], LS[form]), form, BASH)
    assert found.calls == (("Bash", {"command": "ls"}),) * num_calls
    assert found.num_malformed == num_malformed


@pytest.mark.parametrize(
    "value",
    [
        'END = "</tool_call>"',
        "x\n</parameter>\ny",
        "<parameter=foo>\nx\n</parameter>\n<parameter=bar>\ny",
        "</arg_value> y",
        "<arg_key>foo</arg_key><arg_value></arg_value><arg_key>bar</arg_key><arg_value>y",
        'OPEN, END = "<tool_call>", "</tool_call>"',
        'END = "</tool_call>"; OPEN = "<tool_call>"',
    ],
)
@pytest.mark.parametrize("form", CallForm)
def test_a_value_may_hold_the_tags_of_its_call(form: CallForm, value: str) -> None:
    body = LS[form].replace("ls", json.dumps(value)[1:-1] if form is CallForm.JSON else value)
    found = read_calls(f"<tool_call>\n{body}\n</tool_call>", form, BASH)
    assert (found.calls, found.num_malformed) == ((("Bash", {"command": value}),), 0)


@pytest.mark.parametrize("end", ["\n</parameter>\n", "\n</parameter>\n\n  ", "</parameter>"])
def test_a_parameter_that_no_tool_declares_is_no_part_of_the_value_before_it(end: str) -> None:
    xml = f"<function=Bash>\n<parameter=command>\nls{end}<parameter=x>\n5{end}</function>"
    glm = f"{LS[CallForm.PAIRS]}\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>"
    for form, text in ((CallForm.XML, xml), (CallForm.PAIRS, glm)):
        found = read_calls(call(f"\n{text}\n"), form, BASH)
        assert found.calls == (("Bash", {"command": "ls", "x": "5"}),)


@pytest.mark.parametrize("nothing", ["null", '""', "[]"])
def test_a_call_without_arguments_may_name_none(nothing: str) -> None:
    found = read_calls(call(f'{{"name": "f", "arguments": {nothing}}}'), CallForm.JSON)
    assert found.calls == (("f", {}),)


@pytest.mark.parametrize(
    "value",
    [
        r'"\ud83d"',
        "9" * 30,
        "[" * 300 + "]" * 300,
        '{"a": ' * 300 + "0" + "}" * 300,
        "NaN",
        "-Infinity",
        "1e400",
    ],
    ids=["half a character", "over 64 bits", "deep lists", "deep objects", "NaN", "-inf", "1e400"],
)
def test_a_call_that_no_client_could_be_sent_is_malformed(value: str) -> None:
    text = call(f'{{"name": "f", "arguments": {{"a": {value}}}}}')
    found = read_calls(text, CallForm.JSON)
    assert (found.text, found.calls, found.num_malformed) == (text, (), 1)


def test_a_call_as_deep_as_a_client_can_be_sent_is_read() -> None:
    deep = "[" * 200 + "]" * 200
    found = read_calls(call(f'{{"name": "f", "arguments": {{"a": {deep}}}}}'), CallForm.JSON)
    assert orjson.dumps(found.calls[0][1]["a"]).decode() == deep


def test_a_glm_key_without_a_value_takes_no_other_keys_value() -> None:
    text = call("f<arg_key>a</arg_key><arg_key>b</arg_key><arg_value>1</arg_value>")
    found = read_calls(text, CallForm.PAIRS)
    assert (found.calls, found.num_malformed) == ((), 1)
