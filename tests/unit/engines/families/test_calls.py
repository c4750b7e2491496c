"""Reading calls in whatever a model says: never slow, never an error, never what no wire takes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import orjson
import pytest

from swerl.engines.families import tiny
from swerl.engines.families._calls import CallForm, read_calls
from swerl.engines.families.tiny import CALL, CALL_END

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


@pytest.mark.parametrize("num_closed", [0, 1])
def test_the_tiny_family_reads_a_repetition_in_linear_time_too(num_closed: int) -> None:
    family = tiny.build(None)
    opened, closed = map(family._tokenizer.id, (CALL, CALL_END))

    found = family.parse([opened] * MANY + [closed] * num_closed)

    assert (found.calls, found.malformed_calls) == ((), MANY)


@pytest.mark.parametrize(
    "value",
    [
        r'"\ud83d"',
        "9" * 30,
        "[" * 300 + "]" * 300,
        '{"a": ' * 300 + "0" + "}" * 300,
    ],
    ids=["half a character", "a number over 64 bits", "deep lists", "deep objects"],
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
