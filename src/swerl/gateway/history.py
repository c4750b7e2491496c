"""The replies of one Session by what was said before them: which branch a request continues.

Conversations form a tree of places. A step from one place to the next is a message (or a run of
tool results) by its identity: a reply by the call ids that the gateway minted in it, everything
else by its normalised content. A request walks the tree as far as it can; the last reply on the
way is its parent, and only the messages after it are new.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import orjson

from swerl.chat import ChatRequest, Finish, Json, Message, Role, Tool, ToolCall
from swerl.errors import GatewayError
from swerl.turn import RoutedExperts, Turn, WeightChange

_Key: TypeAlias = Hashable

_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?")
"""A number as a model writes it, `050` and `5.0` among them; longer ones would lose digits."""


@dataclass(slots=True, eq=False)
class Node:
    """One recorded reply, held small: arrays take 4 bytes a token where tuples take 36."""

    parent: Node | None
    prompt_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    finish: Finish
    weight_version: str
    started_s: float
    duration_s: float
    trainable: bool
    malformed_calls: int
    index: int | None = None
    """Number of its Turn; None until its client is known to have the reply."""
    message: Message | None = None
    """What was said, where the history policy reads it again."""
    is_rewritten: bool = False
    """Whether it begins a new root because the chat template wrote its past anew."""
    is_continued: bool = False
    """Whether the client has said something after it."""
    weight_changes: tuple[WeightChange, ...] = ()
    routed: RoutedExperts | None = None

    def turn(self) -> Turn:
        """Return the Turn of a reply that was delivered."""
        assert self.index is not None
        return Turn(
            index=self.index,
            parent=None if self.parent is None else self.parent.index,
            prompt_ids=tuple(self.prompt_ids),
            output_ids=tuple(self.output_ids),
            logprobs=tuple(self.logprobs),
            finish=self.finish,
            weight_version=self.weight_version,
            started_s=self.started_s,
            duration_s=self.duration_s,
            trainable=self.trainable,
            malformed_calls=self.malformed_calls,
            weight_changes=self.weight_changes,
            routed=self.routed,
        )


def path_ids(node: Node | None) -> array[int]:
    """Return every token from the root to the end of this reply."""
    nodes = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    ids = array("i")
    for one in reversed(nodes):
        ids += one.prompt_ids
        ids += one.output_ids
    return ids


@dataclass(slots=True)
class _Place:
    """Where a conversation stands after some messages."""

    next: dict[_Key, _Place] = field(default_factory=dict)
    replies: list[Node] = field(default_factory=list)
    """Replies that led here, oldest first: the same text may be sampled twice."""


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a request."""

    parent: Node | None
    """The reply that it continues; None where it begins a new root."""
    new: tuple[Message, ...]
    """Its messages after that reply."""
    root: _Key
    """The tools on offer: they stand before everything else in a prompt."""
    place: _Place | None
    """Where `parent` ends; None at the beginning."""
    keys: tuple[_Key, ...]
    """The steps from there over the new messages."""
    known: tuple[tuple[int, Node], ...]
    """The replies up to `parent`, with the number of each one's message."""


class History:
    """The tree of places of one Session."""

    def __init__(self) -> None:
        self._roots: dict[_Key, _Place] = {}
        self._names: dict[_Key, _Key] = {}
        """Each root's key by itself: one long text is kept however often it is met."""
        self._owners: dict[str, _Key] = {}
        """Minted call id -> identity of the reply that holds it."""

    def match(self, request: ChatRequest) -> Match:
        """Find the longest known branch that the request continues."""
        root = _tools_key(request.tools)
        root = self._names.get(root, root)
        steps = list(self._steps(request.messages))
        parent, place, num_steps, num_messages = None, None, 0, 0
        known: list[tuple[int, Node]] = []
        here = self._roots.get(root)
        for number, (key, end) in enumerate(steps, 1):
            here = here.next.get(key) if here else None
            if here is None:
                break
            if here.replies:
                parent, place, num_steps, num_messages = here.replies[-1], here, number, end
                known.append((end - 1, parent))
        keys = tuple(key for key, _ in steps[num_steps:])
        new = request.messages[num_messages:]
        return Match(parent, new, root, place, keys, tuple(known))

    def add(self, match: Match, message: Message, node: Node) -> None:
        """Record a reply after the messages of `match`."""
        place = self._end(match)
        content = _reply_key(message)
        if not message.tool_calls:
            place.next.setdefault(content, _Place()).replies.append(node)
            return
        owner = _owner_key(message)
        self._owners.update((call.id, owner) for call in message.tool_calls)
        place.next[owner] = place.next[content] = _Place(replies=[node])

    def discard(self, match: Match, message: Message, node: Node) -> None:
        """Forget a reply that `add` recorded: nobody received it."""
        key = _owner_key(message) if message.tool_calls else _reply_key(message)
        self._end(match).next[key].replies.remove(node)

    def _end(self, match: Match) -> _Place:
        name = self._names.setdefault(match.root, match.root)
        place = match.place or self._roots.setdefault(name, _Place())
        for key in match.keys:
            place = place.next.setdefault(key, _Place())
        return place

    def _steps(self, messages: Sequence[Message]) -> Iterator[tuple[_Key, int]]:
        """Yield the key of each step and the number of messages up to its end.

        Blank messages are no step: clients drop them at will.
        """
        position = 0
        while position < len(messages):
            message = messages[position]
            position += 1
            if message.role is Role.TOOL:
                results = {_result_key(message)}
                while position < len(messages) and messages[position].role is Role.TOOL:
                    results.add(_result_key(messages[position]))
                    position += 1
                yield frozenset(results), position
            elif message.role is Role.ASSISTANT:
                yield self._assistant_key(message), position
            elif text := message.text.strip():
                yield (message.role, text), position

    def _assistant_key(self, message: Message) -> _Key:
        owners = (self._owners.get(call.id) for call in message.tool_calls)
        return next(filter(None, owners), None) or _reply_key(message)


def _reply_key(message: Message) -> _Key:
    """Identify a reply by content; thinking is left out because clients drop it."""
    return (message.role, message.text.strip(), tuple(map(_call_key, message.tool_calls)))


def _owner_key(message: Message) -> _Key:
    return ("reply", message.tool_calls[0].id)


def _result_key(message: Message) -> _Key:
    return (message.tool_call_id, message.text.strip())


def _call_key(call: ToolCall) -> _Key:
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


def _tools_key(tools: Sequence[Tool]) -> _Key:
    return _written([[tool.name, tool.description, dict(tool.parameters)] for tool in tools])


def _written(value: Json) -> bytes:
    """Write JSON one way for all. Raises GatewayError where it is nested too deeply."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        message = "a tool's parameters or a call's arguments are nested too deeply"
        raise GatewayError(message) from error
