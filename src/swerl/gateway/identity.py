"""When two messages are the same: what clients change without a change of meaning is left out.

White space and control characters, how a speaker's words are cut into messages and blocks, the
order of arguments, results and tools, and the forms of numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import orjson

from swerl.core.chat import Json, Message, Role, Tool, ToolCall
from swerl.core.errors import GatewayError

Key: TypeAlias = Hashable

_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?")
"""A number as a model writes it, `050` and `5.0` among them; longer ones would lose digits."""
_LEFT_OUT = bytes((*range(33), 127))
"""White space and control characters."""
_WIDE_SPACES = "\u00a0\ufeff\u2028\u2029"
"""What clients trim besides: JavaScript's idea of white space."""
_SHORT = 32
"""Bytes up to which a text stands for itself; of longer ones a digest is kept."""


class Words:
    """What was said, by what it comes to; remembered, for histories are sent again and again."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        """By the texts' hash: the texts themselves are large."""

    def key(self, *texts: str) -> bytes:
        """Identify texts that follow each other, wherever they are cut; empty without words."""
        known = hash(texts)
        if known not in self._known:
            self._known[known] = _short(b"".join(map(_squeezed, texts)))
        return self._known[known]

    def reply_key(self, message: Message) -> Key:
        """Identify a reply by content; thinking is left out because clients drop it."""
        return (message.role, self.key(message.text), tuple(map(_call_key, message.tool_calls)))

    def heard_key(self, messages: Sequence[Message], places: Mapping[str, Hashable]) -> Key:
        """Identify what was said between two replies: a set of results, and each speaker's words.

        `places` says of each call id which call of the reply it is: some clients count calls anew
        in each request.
        """
        results: set[Key] = set()
        spoken: list[tuple[Role, list[str]]] = []
        for message in messages:
            if message.role is Role.TOOL:
                results.add((places.get(message.tool_call_id), self.key(message.text)))
            elif spoken and spoken[-1][0] is message.role:
                spoken[-1][1].append(message.text)
            else:
                spoken.append((message.role, [message.text]))
        return (frozenset(results), *((role, self.key(*texts)) for role, texts in spoken))


def joined(run: Sequence[Message]) -> Message:
    """Return what the assistant says in neighbouring messages as one."""
    if len(run) == 1:
        return run[0]
    return Message(
        Role.ASSISTANT,
        "\n".join(message.text for message in run if message.text),
        "\n".join(message.thinking for message in run if message.thinking),
        tuple(call for message in run for call in message.tool_calls),
    )


def tools_key(tools: Sequence[Tool]) -> Key:
    """Identify the tools on offer, in whatever order."""
    ordered = sorted(tools, key=lambda tool: tool.name)
    return _written([[tool.name, tool.description, dict(tool.parameters)] for tool in ordered])


def _call_key(call: ToolCall) -> Key:
    """Identify a call by content: clients re-order its arguments and coerce their values."""
    return (call.name, frozenset((key, _plain(value)) for key, value in call.arguments.items()))


def _plain(value: Json) -> str:
    match value:
        case str():
            text = value.strip()
            return _plain(float(text)) if _NUMBER.fullmatch(text) else text
        case float() if value.is_integer():
            return str(int(value))
        case _:
            return _written(value).decode()


def _squeezed(text: str) -> bytes:
    if not text.isascii():
        for space in _WIDE_SPACES:
            text = text.replace(space, "")
    return text.encode("utf-8", "surrogatepass").translate(None, _LEFT_OUT)


def _short(text: bytes) -> bytes:
    if len(text) <= _SHORT:
        return text
    return hashlib.blake2b(text, digest_size=_SHORT).digest()


def _written(value: Json) -> bytes:
    """Write JSON one way for all. Raises GatewayError where it is nested too deeply."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise GatewayError(
            "a tool's parameters or a call's arguments are nested too deeply"
        ) from error


BLANK: Key = Words().reply_key(Message(Role.ASSISTANT))
"""A reply without words and calls."""
