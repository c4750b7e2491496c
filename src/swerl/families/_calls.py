"""The forms in which model lines write tool calls, and reading them back from a reply's text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from swerl.chat import Json
from swerl.families._xml_calls import read_call as read_xml

_Call: TypeAlias = tuple[str, Mapping[str, Json]]

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPENED = "<tool_call>"
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*(.*)", re.DOTALL)
_GLM_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


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
    """Find the calls in a reply's text."""
    kept: list[str] = []
    calls: list[_Call] = []
    malformed = end = 0
    for block in _BLOCK.finditer(text):
        kept.append(text[end : block.start()])
        end = block.end()
        call = _READERS[form](block[1])
        if call is None:
            malformed += 1
            kept.append(block[0])
        else:
            calls.append(call)
    kept.append(text[end:])
    if _OPENED in kept[-1]:
        malformed += 1  # cut short, or never closed
    said = "".join(_without_gaps(kept) if calls else kept)
    return ReadCalls(said, tuple(calls), malformed)


def _without_gaps(parts: list[str]) -> Iterator[str]:
    """Yield the text around calls without the blank lines that only part it from them."""
    yield parts[0].rstrip()
    yield from (part for part in parts[1:] if part.strip())


def _read_json(body: str) -> _Call | None:
    try:
        found = json.loads(body, strict=False)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    return (found["name"], arguments) if isinstance(arguments, dict) else None


def _read_pairs(body: str) -> _Call | None:
    named = _GLM_NAME.fullmatch(body)
    if named is None:
        return None
    arguments: dict[str, Json] = {}
    end = 0
    for pair in _GLM_PAIR.finditer(named[2]):
        if pair.start() != end:
            return None
        arguments[pair[1].strip()] = pair[2]
        end = pair.end()
    return None if named[2][end:].strip() else (named[1], arguments)


_READERS = {CallForm.JSON: _read_json, CallForm.XML: read_xml, CallForm.PAIRS: _read_pairs}
