"""The conversation types of every dialect, family and engine: messages, tools, request, reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class Role(StrEnum):
    """Author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Finish(StrEnum):
    """Reason why a reply ended."""

    STOP = "stop"
    """The model ended its turn."""
    TOOL_CALLS = "tool_calls"
    """The model ended its turn with calls to tools."""
    LENGTH = "length"
    """The token limit cut the reply."""
    ABORT = "abort"
    """The generation was aborted from outside; the reply never reached its client."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `id` is minted by the gateway and unique in its session."""

    id: str
    name: str
    arguments: Mapping[str, Json]
    is_text: bool = False
    """True if its tool accepts one free text, which is the argument `input`."""
    namespace: str = ""
    """Namespace of its tool, with which `name` begins."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. A tool result is a message with role `tool` and the id of its call."""

    role: Role
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


def joined(messages: Sequence[Message]) -> Message:
    """Return neighbouring messages of the assistant as one."""
    if len(messages) == 1:
        return messages[0]
    return Message(
        Role.ASSISTANT,
        "\n".join(message.text for message in messages if message.text),
        "\n".join(message.thinking for message in messages if message.thinking),
        tuple(call for message in messages for call in message.tool_calls),
    )


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the client offers; `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict)
    is_text: bool = False
    """True if it accepts one free text, which is the argument `input`."""
    namespace: str = ""
    """Namespace in which the client offers it; `name` begins with it and a dot."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for the next assistant message."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    """Maximum tokens of the reply as the client set it; None: the session's limit."""
    stream: bool = False
    model: str = ""
    late_tools: tuple[Tool, ...] = ()
    """Tools that arrived after the first message; a message describes them at that point."""
    allows_calls: bool = True
    """False if the client takes no calls in the reply, although it offers tools."""
    stop: tuple[str, ...] = ()
    """Texts before which the reply's text ends."""
    is_large: bool = field(default=False, compare=False)
    """True if its body is so large that work on it would block an event loop."""

    def first_stop(self, text: str) -> str:
        """Return the stop text that comes first in a reply's text; empty if none does."""
        places = [(text.find(stop), -len(stop), stop) for stop in self.stop if stop in text]
        return min(places)[2] if places else ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one reply. `cached_tokens` is the part of the prompt that was reused."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    thinking_tokens: int = 0
    """Part of the completion that is thinking, with its opening and closing tokens."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A model's reply in parts. Tool calls carry no ids yet: the gateway mints them."""

    text: str
    thinking: str
    calls: tuple[tuple[str, Mapping[str, Json]], ...]
    malformed_calls: int = 0
    thinking_tokens: int = field(default=0, compare=False)
    """Sampled ids that are thinking, with its opening and closing tokens."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The next assistant message as the client receives it."""

    id: str
    message: Message
    finish: Finish
    usage: Usage = Usage()
    model: str = ""
    malformed_calls: int = 0
    """Calls in the reply that could not be parsed; they stay in `message.text`."""
    stop: str | None = None
    """The stop text that ended the reply, if one did."""
