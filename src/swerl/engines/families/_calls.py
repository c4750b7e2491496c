"""Read the tool calls in a reply's text, in the formats of the model lines.

There are three formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import orjson

from swerl.core.chat import Json

_Call: TypeAlias = tuple[str, Mapping[str, Json]]

_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_XML_CALL = re.compile(r"\s*<function=([^>\n]+)>\n(.*)</function>\s*", re.DOTALL)
_XML_KEY = re.compile(r"<parameter=([^>\n]+)>\n")
_XML_VALUE_END = re.compile(r"\n</parameter>\n(?=<parameter=|\Z)")
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = "</arg_value>"
_WIRE_LEVELS = 16
"""Most levels of JSON that a wire format puts around a call's arguments."""


class CallForm(StrEnum):
    """The format of a call between `<tool_call>` and `</tool_call>`."""

    JSON = "json"
    """An object with `name` and `arguments`: Qwen3, Hermes."""
    XML = "xml"
    """`<function=NAME>` with one `<parameter=KEY>` per value: Qwen3-Coder, Qwen3.5 and 3.6."""
    PAIRS = "pairs"
    """The name, then `<arg_key>` and `<arg_value>` alternately: GLM 4.5 and later."""


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """A reply's text split into text and calls. A malformed call stays in `text`."""

    text: str
    calls: tuple[_Call, ...]
    num_malformed: int


def read_calls(text: str, form: CallForm) -> ReadCalls:
    """Find the calls in a reply's text.

    The time is linear in the text's length for every text: the event loop waits for it, and a model
    in training may repeat one token ten thousand times.
    """
    texts: list[str] = []
    calls: list[_Call] = []
    malformed = end = 0
    read = {CallForm.JSON: _read_json, CallForm.XML: read_xml_call, CallForm.PAIRS: _read_pairs}
    for start, stop in _blocks(text):
        texts.append(text[end:start])
        end = stop
        call = read[form](text[start + len(_OPENED) : stop - len(_CLOSED)])
        if call is None:
            malformed += 1
            texts.append(text[start:stop])
        else:
            calls.append(call)
    texts.append(text[end:])
    if _OPENED in texts[-1]:
        malformed += 1  # truncated, or never closed
    if calls:  # drop the blank lines that only separate text from calls
        texts = [texts[0].rstrip(), *(part for part in texts[1:] if part.strip())]
    return ReadCalls("".join(texts), tuple(calls), malformed)


def is_sendable(arguments: Mapping[str, Json]) -> bool:
    """Return True if these arguments can be sent to a client.

    No wire format carries half a surrogate pair. Clients' JSON readers refuse numbers over 64 bits
    and 254 nested lists.
    """
    value: Json = dict(arguments)
    for _ in range(_WIRE_LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def write_xml_call(name: str, arguments: Mapping[str, Json]) -> str:
    """Return the text between a call's opening and closing tokens, in the XML format."""
    parameters = ""
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parameters += f"<parameter={key}>\n{text}\n</parameter>\n"
    return f"\n<function={name}>\n{parameters}</function>\n"


def read_xml_call(body: str) -> tuple[str, dict[str, Json]] | None:
    """Return name and arguments, each value exactly as written; None if it is malformed."""
    call = _XML_CALL.fullmatch(body)
    if call is None:
        return None
    name, parameters = call.groups()
    arguments: dict[str, Json] = {}
    end = 0
    while end < len(parameters):
        key = _XML_KEY.match(parameters, end)
        stop = _XML_VALUE_END.search(parameters, key.end()) if key else None
        if key is None or stop is None:
            return None
        arguments[key[1]] = parameters[key.end() : stop.start()]
        end = stop.end()
    return name, arguments


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each closed call, tags included."""
    start = text.find(_OPENED)
    while start >= 0:
        end = text.find(_CLOSED, start)
        if end < 0:
            return
        yield start, end + len(_CLOSED)
        start = text.find(_OPENED, end)


def _read_json(body: str) -> _Call | None:
    try:
        value = json.loads(body, strict=False)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not is_sendable({value["name"]: arguments}):
        return None
    return value["name"], arguments


def _read_pairs(body: str) -> _Call | None:
    match = _GLM_NAME.match(body)
    if match is None:
        return None
    arguments: dict[str, Json] = {}
    end = match.end()
    while key := _GLM_KEY.match(body, end):
        stop = body.find(_GLM_VALUE_END, key.end())
        if stop < 0:
            return None
        arguments[key[1].strip()] = body[key.end() : stop]
        end = stop + len(_GLM_VALUE_END)
    return None if body[end:].strip() else (match[1], arguments)
