"""Read a reply: thinking, text, and the tool calls in the formats of the model lines.

A tag is a tag only where the model sampled its special token: the same name as plain text inside a
value ends nothing. If no call is found so, names in plain text count too. A call that lacks a tag
is read if it is otherwise whole, and counted as malformed if not: it is never lost in silence.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import orjson

from swerl.core.chat import Json, ParsedReply, Tool
from swerl.core.schema import properties
from swerl.engines.families._tokenizer import Special, SplitTokenizer

_Call: TypeAlias = tuple[str, Mapping[str, Json]]

THINK, THINK_END = "<think>", "</think>"
_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_ARG_KEY = "<arg_key>"
_TAGS = {THINK, THINK_END, _OPENED, _CLOSED, _ARG_KEY, "</arg_key>", "<arg_value>", "</arg_value>"}
_TAG = re.compile(f"{_OPENED}|{_CLOSED}")
_GUARDS = tuple(map(chr, range(0xF5000, 0xF5100)))
"""Private characters; one that a reply lacks breaks the names of tags in its plain text."""
_STRUCTURE = re.compile(r"\s*(?:[{\[]|<(?!/tool_call>)|[^\s<]+\s*<arg_)")
"""What follows an opening tag of a call, and not of prose that names the tag."""
_LINE_CHARS = 80
"""Characters around a tag that are looked at to tell a call from prose."""
_JSON_OPENED = re.compile(r"\s*\{")
_JSON_HEAD = re.compile(r'\{\s*"name"\s*:')
_JSON_END = re.compile(r"\s*</tool_call>")
_MOST_OBJECTS = 100
"""Objects that are read beyond the next tag, each of which may be long."""
_LAST_WORD = re.compile(r"[\w./:-]+(?=\s*\Z)")
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
class _Markup:
    """The tags of a form that writes each value as text."""

    head: re.Pattern[str]
    key: re.Pattern[str]
    opened: str
    value_end: str
    end: re.Pattern[str]
    bare: re.Pattern[str]
    """The beginning of a call without its opening tag."""
    bare_end: re.Pattern[str]
    line_end: str = ""
    """Put between a value and its end."""


_MARKUPS = {
    CallForm.XML: _Markup(
        head=re.compile(r"\s*<function=([^>\n]+)>\n"),
        key=re.compile(r"\s*<parameter=([^>\n]+)>\n"),
        opened="<parameter=",
        value_end="</parameter>",
        end=re.compile(r"\s*</function>\s*</tool_call>"),
        bare=re.compile(r"<function=[^>\n]+>\n(?=<parameter=|</function>)"),
        bare_end=re.compile(r"\s*</function>(?:\s*</tool_call>)?"),
        line_end="\n",
    ),
    CallForm.PAIRS: _Markup(
        # A word between two spaces is prose about both tags.
        head=re.compile(r"(?! \w+ </tool_call>)\s*([\w./:-]+)\s*(?=<arg_key>|</tool_call>)"),
        key=re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
        opened=_ARG_KEY,
        value_end="</arg_value>",
        end=re.compile(r"\s*</tool_call>"),
        bare=re.compile(_ARG_KEY),
        bare_end=re.compile(r"\s*</tool_call>"),
    ),
}


class _Span(NamedTuple):
    """A call in a text; None if it is malformed."""

    start: int
    end: int
    call: _Call | None


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """A reply's text split into text and calls. A malformed call stays in `text`."""

    text: str
    spans: tuple[_Span, ...]

    @property
    def calls(self) -> tuple[_Call, ...]:
        return tuple(span.call for span in self.spans if span.call)

    @property
    def num_malformed(self) -> int:
        return len(self.spans) - len(self.calls)


def read_reply(
    tokenizer: SplitTokenizer,
    ids: Sequence[int],
    form: CallForm,
    tools: Sequence[Tool],
    *,
    opens_thinking: bool,
    is_closed: bool,
) -> ParsedReply:
    """Read sampled ids, without the stop, as thinking, text and tool calls.

    `opens_thinking`: the prompt ends with `<think>`. `is_closed`: the model ended its turn.
    """
    pieces = list(tokenizer.pieces(ids))
    plain = "".join(pieces)
    names = {piece for piece in pieces if isinstance(piece, Special)} & _TAGS
    guard = next((mark for mark in _GUARDS if mark not in plain), "")
    rests = "|".join(re.escape(name[1:]) for name in names) or r"(?!)"
    tags = re.compile(f"<(?={rests})")
    guarded = "".join(
        piece if isinstance(piece, Special) else tags.sub("<" + guard, piece) for piece in pieces
    )
    reader = _ReplyReader(form, tools, opens_thinking, is_closed)
    reply, rest = reader.read(guarded)
    if guarded != plain and not reply.calls and not reply.malformed_calls:
        reply, rest = reader.read(plain)
    reply, rest = _unbroken(reply, guard), rest.replace(guard, "")
    if not reply.thinking:
        return reply
    head = plain[: len(plain) - len(rest)]
    num = tokenizer.count_thinking(ids, head) if rest else len(ids)
    return replace(reply, thinking_tokens=num)


def read_calls(text: str, form: CallForm, tools: Sequence[Tool] = ()) -> ReadCalls:
    """Find the calls in a reply's text; parameters that `tools` do not declare are text.

    The time is linear in the text's length for every text: the event loop waits for it, and a model
    in training may repeat one token ten thousand times.
    """
    texts: list[str] = []
    end = 0
    spans = tuple(_Reader(text, form, tools).spans())
    for span in spans:
        texts.append(text[end : span.start])
        end = span.end
        if span.call is None:
            texts.append(text[span.start : end])
    texts.append(text[end:])
    if any(span.call for span in spans):  # drop the blank lines that only separate text from calls
        texts = [texts[0].rstrip(), *(part for part in texts[1:] if part.strip())]
    return ReadCalls("".join(texts), spans)


def is_sendable(value: Json) -> bool:
    """Return True if a call's arguments can be sent to a client.

    No wire format carries half a surrogate pair. Clients' JSON readers refuse numbers over 64 bits
    and 254 nested lists.
    """
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


@dataclass(frozen=True, slots=True)
class _ReplyReader:
    """Splits the text of a reply into thinking and the rest."""

    form: CallForm
    tools: Sequence[Tool]
    opens_thinking: bool
    is_closed: bool

    def read(self, text: str) -> tuple[ParsedReply, str]:
        """Return the reply, and the part of the text after its thinking."""
        thinking, rest = "", text
        if self.opens_thinking or text.lstrip().startswith(THINK):
            body = text.lstrip().removeprefix(THINK)
            end = self._end_of_thinking(body)
            thinking, rest = body[:end].strip("\n"), body[end:].removeprefix(THINK_END)
            rest = rest.removeprefix("\n\n" if rest.startswith("\n\n") else "\n")
        read = read_calls(rest, self.form, self.tools)
        return ParsedReply(read.text, thinking, read.calls, read.num_malformed), rest

    def _end_of_thinking(self, body: str) -> int:
        """Return the place of `</think>`, or of the call that ends thinking without it."""
        end = body.find(THINK_END)
        if end >= 0 and not self._begins_in_call(body[end:]):
            return end
        spans = read_calls(body, self.form, self.tools).spans
        if end >= 0:
            return next((span.start for span in spans if span.start < end < span.end), end)
        # A call after which a limit cut the thinking may be a draft.
        is_last = bool(spans) and not body[spans[-1].end :].strip()
        is_certain = self.is_closed or (is_last and spans[-1].call is not None)
        return spans[0].start if spans and is_certain else len(body)

    def _begins_in_call(self, rest: str) -> bool:
        """Return True if the first tag of a text ends a call that begins before the text."""
        tag = _TAG.search(rest)
        is_end = tag is not None and tag[0] == _CLOSED
        return is_end and not read_calls(rest, self.form, self.tools).calls


class _Reader:
    """Finds the calls of one text.

    A call ends at the first place from which the rest of it can be read, but before the next call:
    an opening tag after a closing one, with the beginning of a call behind it.
    """

    def __init__(self, text: str, form: CallForm, tools: Sequence[Tool]) -> None:
        self._text = text
        self._markup = _MARKUPS.get(form)
        self._tools = {tool.name: tool for tool in tools}
        head = self._markup.head if self._markup else _JSON_OPENED
        bare = self._markup.bare if self._markup else _JSON_HEAD
        self._start = re.compile(f"(?P<tag>{_TAG.pattern})|{bare.pattern}")
        self._num_objects = 0
        self._limits: list[int] = []
        """Places at which a call surely begins."""
        self._ends: list[int] = []
        """Ends of closing tags."""
        previous = ""
        for tag in _TAG.finditer(text):
            if tag[0] == _CLOSED:
                self._ends.append(tag.end())
            elif previous == _CLOSED and head.match(text, tag.end()):
                self._limits.append(tag.start())
            previous = tag[0]

    def spans(self) -> Iterator[_Span]:
        place = 0
        while match := self._start.search(self._text, place):
            index = bisect_right(self._limits, match.start())
            limit = self._limits[index] if index < len(self._limits) else len(self._text)
            span = self._span(match, place, limit)
            if span:
                yield span
            place = span.end if span else match.end()

    def _span(self, match: re.Match[str], least: int, limit: int) -> _Span | None:
        """Return the call that a tag or its beginning opens, or None if it is prose."""
        start, end = match.span()
        if match["tag"] == _CLOSED:
            return _Span(start, end, None) if self._is_lost_end(start, end) else None
        is_bare = match["tag"] is None
        if self._markup is None:
            call, stop = self._read_json(start if is_bare else end, limit, is_bare)
        else:
            if is_bare and match[0] == _ARG_KEY:  # the name is before it
                name = _LAST_WORD.search(self._text, max(least, start - _LINE_CHARS), start)
                start = name.start() if name else start
            call, stop = self._read_markup(self._markup, start if is_bare else end, limit, is_bare)
        if call:
            return _Span(start, stop, call)
        if self._markup is None and is_bare:
            return None  # a JSON object; a closing tag behind it counts
        if not is_bare and not self._is_attempt(start, end, limit):
            return None
        index = bisect_right(self._ends, limit) - 1
        stop = self._ends[index] if index >= 0 and self._ends[index] > end else limit
        return _Span(start, stop, None)

    def _read_json(self, start: int, limit: int, is_bare: bool) -> tuple[_Call | None, int]:
        opened = _JSON_OPENED.match(self._text, start, limit)
        value = None
        if opened and not is_bare:
            value, end = _json_object(self._text[opened.end() - 1 : limit])
        # A string may hold tags, so a tag does not end an object.
        if opened and value is None and self._num_objects < _MOST_OBJECTS:
            self._num_objects += 1
            value, end = _json_object(self._text[opened.end() - 1 :])
        if opened is None or value is None:
            return None, start
        end += opened.end() - 1
        name, others = value.get("name"), value.keys() - {"name", "id", "type"}
        arguments = value.get("arguments", value.get("parameters", others)) or {}
        if not isinstance(name, str) or not isinstance(arguments, dict) or not is_sendable(value):
            return None, start
        closing = _JSON_END.match(self._text, end)
        is_offered = is_bare and name in self._tools and "arguments" in value
        if not (closing or is_offered):
            return None, start
        return (name, arguments), closing.end() if closing else end

    def _read_markup(
        self, markup: _Markup, start: int, limit: int, is_bare: bool
    ) -> tuple[_Call | None, int]:
        text = self._text
        head = markup.head.match(text, start, limit)
        if head is None:
            return None, start
        name, arguments = head[1], dict[str, Json]()
        is_offered = not self._tools or name in self._tools
        ends = markup.bare_end if is_bare and is_offered else markup.end
        declared = properties(self._tools[name].parameters) if name in self._tools else {}
        last = _last_end(text, markup.value_end, ends, head.end(), limit)
        place = head.end()
        while not (end := ends.match(text, place, limit)):
            key = markup.key.match(text, place, limit)
            if key is None:
                return None, start
            opened = text.find(markup.opened, key.end(), limit)
            stop = key.end() - 1
            while True:
                stop = text.find(markup.value_end, stop + 1, limit)
                if not 0 <= stop <= last:
                    return None, start
                place = stop + len(markup.value_end)
                # A name that comes twice is part of the value. So is one that is not declared, if
                # the value holds the beginning of a key: it is a text about calls.
                following = markup.key.match(text, place, limit)
                known = following and following[1].strip()
                is_new = known and known not in {*arguments, key[1].strip()}
                is_next = is_new and (not declared or known in declared or opened > stop)
                if is_next or ends.match(text, place, limit):
                    break
            arguments[key[1].strip()] = text[key.end() : stop].removesuffix(markup.line_end)
        return (name, arguments), end.end()

    def _is_attempt(self, start: int, end: int, limit: int) -> bool:
        """Return True if an opening tag belongs to a call, not to prose that names the tag."""
        rest = self._text[end : min(limit, end + _LINE_CHARS)]
        if _STRUCTURE.match(rest):
            return True
        before = self._text[max(0, start - _LINE_CHARS) : start]
        starts_line = not before.rpartition("\n")[2].strip()
        if rest[:1].isalnum() or rest[:1] == "\n":
            index = bisect_right(self._ends, end)
            is_closed = index < len(self._ends) and self._ends[index] <= limit
            return starts_line or is_closed
        return starts_line and (not rest.strip() or rest.startswith(_CLOSED))

    def _is_lost_end(self, start: int, end: int) -> bool:
        """Return True if a closing tag without its call ends a line, as behind a call."""
        after = self._text[end : end + _LINE_CHARS].partition("\n")[0]
        before = self._text[max(0, start - _LINE_CHARS) : start].rstrip(" \t")
        is_behind = not before or before.endswith(("\n", "}", ">"))
        return is_behind and not before.endswith(_OPENED) and not after.strip()


def _json_object(text: str) -> tuple[dict[str, Any] | None, int]:
    """Return the object at the start of a text, if it is whole, and its end."""
    try:
        value, end = _JSON.raw_decode(text)
        if isinstance(value.get("arguments"), str):
            value["arguments"] = _JSON.decode(value["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None, 0
    return value, end


def _last_end(text: str, value_end: str, ends: re.Pattern[str], start: int, limit: int) -> int:
    """Return the last place at which a value ends its call, -1 if there is none.

    No value is looked for behind it, so that each text is read in linear time.
    """
    place = text.rfind(value_end, start, limit)
    while place >= 0 and not ends.match(text, place + len(value_end), limit):
        place = text.rfind(value_end, start, place + len(value_end) - 1)
    return place


def _unbroken(reply: ParsedReply, guard: str) -> ParsedReply:
    def restored(value: Json) -> Json:
        match value:
            case str():
                return value.replace(guard, "")
            case list():
                return [restored(item) for item in value]
            case dict():
                return {key.replace(guard, ""): restored(item) for key, item in value.items()}
            case _:
                return value

    calls = tuple(
        (name, {key.replace(guard, ""): restored(item) for key, item in arguments.items()})
        for name, arguments in reply.calls
    )
    text, thinking = reply.text.replace(guard, ""), reply.thinking.replace(guard, "")
    return replace(reply, text=text, thinking=thinking, calls=calls)


def _refuse(literal: str) -> float:
    raise ValueError(f"JSON has no {literal}")


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _refuse(literal)


_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)
