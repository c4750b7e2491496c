"""The forms in which model lines write tool calls, and reading them back from a reply's text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import orjson

from swerl.core.chat import Json
from swerl.engines.families._xml_calls import read_call as read_xml

_Call: TypeAlias = tuple[str, Mapping[str, Json]]

_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = "</arg_value>"
_WIRE_LEVELS = 16
"""Levels of JSON around a call's arguments in a client's answer, at most."""


class CallForm(StrEnum):
    """How a model line writes a call between `<tool_call>` and `</tool_call>`."""

    JSON = "json"
    """An object with `name` and `arguments`: Qwen3, Hermes."""
    XML = "xml"
    """`<function=NAME>` with one `<parameter=KEY>` a value: Qwen3-Coder, Qwen3.5 and 3.6."""
    PAIRS = "pairs"
    """The name, then `<arg_key>` and `<arg_value>` in turns: GLM 4.5 and later."""


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """A reply's text taken apart. A call that cannot be read stays in `text`."""

    text: str
    calls: tuple[_Call, ...]
    num_malformed: int


def read_calls(text: str, form: CallForm) -> ReadCalls:
    """Find the calls in a reply's text.

    Takes time by the text's length whatever it says: everybody waits while a reply is read, and a
    model in training may say one token ten thousand times.
    """
    kept: list[str] = []
    calls: list[_Call] = []
    malformed = end = 0
    for start, stop in _blocks(text):
        kept.append(text[end:start])
        end = stop
        call = _READERS[form](text[start + len(_OPENED) : stop - len(_CLOSED)])
        if call is None:
            malformed += 1
            kept.append(text[start:stop])
        else:
            calls.append(call)
    kept.append(text[end:])
    if _OPENED in kept[-1]:
        malformed += 1  # cut short, or never closed
    said = "".join(_without_gaps(kept) if calls else kept)
    return ReadCalls(said, tuple(calls), malformed)


def is_sendable(arguments: Mapping[str, Json]) -> bool:
    """Say whether a client can be sent these arguments.

    No wire takes half a character, and clients' readers end at numbers over 64 bits and at 254
    levels of lists.
    """
    value: Json = dict(arguments)
    for _ in range(_WIRE_LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each closed call begins and ends, with its tags."""
    start = text.find(_OPENED)
    while start >= 0:
        end = text.find(_CLOSED, start)
        if end < 0:
            return
        yield start, end + len(_CLOSED)
        start = text.find(_OPENED, end)


def _without_gaps(parts: list[str]) -> Iterator[str]:
    """Yield the text around calls without the blank lines that only part it from them."""
    yield parts[0].rstrip()
    yield from (part for part in parts[1:] if part.strip())


def _read_json(body: str) -> _Call | None:
    try:
        found = json.loads(body, strict=False)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not is_sendable({found["name"]: arguments}):
        return None
    return found["name"], arguments


def _read_pairs(body: str) -> _Call | None:
    named = _GLM_NAME.match(body)
    if named is None:
        return None
    arguments: dict[str, Json] = {}
    end = named.end()
    while key := _GLM_KEY.match(body, end):
        stop = body.find(_GLM_VALUE_END, key.end())
        if stop < 0:
            return None
        arguments[key[1].strip()] = body[key.end() : stop]
        end = stop + len(_GLM_VALUE_END)
    return None if body[end:].strip() else (named[1], arguments)


_READERS = {CallForm.JSON: _read_json, CallForm.XML: read_xml, CallForm.PAIRS: _read_pairs}
