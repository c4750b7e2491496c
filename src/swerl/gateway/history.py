"""The tree of one Session's messages and replies: find the branch that a request continues.

A step of the tree is a reply, or all messages between two replies, keyed by its identity. A request
is walked down the tree as far as its steps are known. The last reply on the way is its parent, and
only the messages after it are new. Requests repeat each other, so a walk begins where the last one
of the same messages came to its last reply.

Two messages are identical if they differ only in what clients change on replay: white space and
control characters, the cuts between messages and blocks, thinking, the order of arguments, results
and tools, and the spelling of numbers.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TypeAlias

import orjson

from swerl.core.chat import ChatRequest, Finish, Json, Message, Role, Tool, ToolCall, joined
from swerl.core.errors import GatewayError
from swerl.core.turn import RoutedExperts, Turn, WeightChange
from swerl.gateway.limits import LONG_BYTES, num_chars

Key: TypeAlias = Hashable

_BLANK: Key = (Role.ASSISTANT, b"", ())
"""Key of a reply without text and calls."""
_MOST_PARTS = 8
"""Messages of one role among which a known prefix is looked for."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?")
"""A number as a model writes it, such as `050` and `5.0`; a longer one would lose digits."""
_LEFT_OUT = bytes((*range(33), 127))
"""White space and control characters."""
_WIDE_SPACES = "\u00a0\ufeff\u2028\u2029"
"""Further characters that JavaScript trims as white space."""
_MOST_TEXT_KEYS = 50_000
"""Texts whose keys are kept, in 10 MiB; a conversation has hundreds."""
_MOST_WALKS = 4
"""Walks to continue: of a Session's agent, and of sub-agents at work."""
_SHORT = 32
"""Bytes up to which a text is its own key; a longer one is hashed."""


@dataclass(slots=True, eq=False)
class ReplyNode:
    """One recorded reply, kept small: an array takes 4 bytes a token, a tuple takes 36."""

    parent: ReplyNode | None
    prompt_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    finish: Finish
    weight_version: str
    started_s: float
    duration_s: float
    trainable: bool
    malformed_calls: int
    num_reported: int = 0
    """Sampled tokens by the count of an engine that returns no ids."""
    num_prompt_reported: int = 0
    """Tokens of the prompt by that count."""
    index: int | None = None
    """Number of its Turn; None until a client has received the reply."""
    thinking: bytes = b""
    """Key of its thinking, if it has no calls, whose ids identify a reply."""
    message: Message | None = None
    """The reply itself, if the history policy needs it again."""
    is_rewritten: bool = False
    """True if it begins a new root because the chat template changed its past."""
    is_continued: bool = False
    """True once the client has continued it."""
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
            num_reported=self.num_reported,
            num_prompt_reported=self.num_prompt_reported,
            malformed_calls=self.malformed_calls,
            weight_changes=self.weight_changes,
            routed=self.routed,
        )


@dataclass(slots=True)
class _Point:
    """A point of the tree: after these messages."""

    next: dict[Key, _Point] = field(default_factory=dict)
    replies: list[ReplyNode] = field(default_factory=list)
    """Replies that end here, oldest first: the same text may be sampled twice."""


@dataclass(slots=True)
class _Step:
    """A reply, or all messages between two, in a request. Not frozen: made by the hundred."""

    key: Key
    end: int
    """Number of messages up to its end."""
    messages: tuple[Message, ...]
    before: tuple[ToolCall, ...] = ()
    """The calls that its tool results can answer."""

    @property
    def is_reply(self) -> bool:
        """True for messages of the assistant."""
        return self.messages[0].role is Role.ASSISTANT


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Assistant messages at a request's end: a client may send them and the reply as one."""

    place: _Point | None
    """The place of the last known reply before them."""
    keys: tuple[Key, ...]
    """The steps from there to their beginning."""
    message: Message


@dataclass(frozen=True, slots=True)
class Match:
    """The known part of a request."""

    parent: ReplyNode | None
    """The reply that it continues; None if it begins a new root."""
    new: tuple[Message, ...]
    """Its messages after that reply."""
    root: Key
    """The offered tools: they come first in a prompt."""
    place: _Point | None
    """The place of `parent`; None at the root."""
    keys: tuple[Key, ...]
    """The steps from there over the new messages."""
    rereads: tuple[tuple[int, ReplyNode], ...]
    """If the tree `rereads`: number and node of each reply up to `parent` that is one message."""
    prefill: _Prefill | None = None
    """Set if the request ends with assistant messages."""


@dataclass(slots=True)
class _TreeWalk:
    """A walk down the tree, after some messages of a request. Not frozen: made by the hundred."""

    here: _Point | None
    """None after an unknown step."""
    num_walked: int = 0
    parent: ReplyNode | None = None
    """The last known reply on the way."""
    place: _Point | None = None
    """The place of `parent`."""
    num_messages: int = 0
    """Messages up to `parent`."""
    keys: tuple[Key, ...] = ()
    """The steps after `parent`."""


@dataclass(frozen=True, slots=True)
class _Walked:
    """The walk to a request's last known reply."""

    root: Key
    messages: tuple[Message, ...]
    walk: _TreeWalk
    num_chars: int = 0


class MessageTree:
    """The tree of one Session."""

    def __init__(self, *, rereads: bool = False) -> None:
        """`rereads`: prompts need the earlier replies again; a blank one must then be sent."""
        self._rereads = rereads
        self._text_keys: dict[int, bytes] = {}
        """Keys by hash of the texts: histories repeat, and the texts are too large to keep."""
        self._roots: dict[Key, _Point] = {}
        self._names: dict[Key, Key] = {}
        """Each root's key by itself, so that a long key is stored once."""
        self._minted: dict[str, tuple[Key, int]] = {}
        """Minted call id -> key of its reply, and number of the call in it."""
        self._offered: tuple[Sequence[Tool], Key] = ((), _tools_key(()))
        self._walked: list[_Walked] = []
        """The latest walks, the last one first."""

    def match(self, request: ChatRequest) -> Match:
        """Find the longest known branch that the request continues.

        May run in a thread while the event loop adds or discards replies.
        """
        root, messages = self._root(request.tools), request.messages
        began = self._begin(root, messages)
        rereads: list[tuple[int, ReplyNode]] = []
        before_last, last, turn = (walk := began.walk), None, None
        for step, there, reply in self._walk(walk, self._steps(messages, walk.num_walked)):
            last = step
            if step.is_reply:
                before_last = walk
            # The step is unknown, or its reply was discarded, or it lies between two replies.
            if reply is None:
                keys = (*walk.keys, step.key)
                walk = _TreeWalk(there, step.end, walk.parent, walk.place, walk.num_messages, keys)
                continue
            turn = before_last
            if self._rereads and len(step.messages) == 1:
                rereads.append((step.end - 1, reply))
            walk = _TreeWalk(there, step.end, reply, there, step.end)
        # A walk that is continued does not pass the earlier replies.
        if turn and not self._rereads:
            self._keep(began, _Walked(root, messages[: turn.num_walked], turn))
        # The parent is the last known reply; every step after it is new.
        new = messages[walk.num_messages :]
        match = Match(walk.parent, new, root, walk.place, walk.keys, tuple(rereads))
        if not last or not last.is_reply:
            return match
        # A prefill starts after the reply before it.
        prefill = _Prefill(before_last.place, before_last.keys, joined(last.messages))
        return replace(match, prefill=prefill)

    def add(self, match: Match, message: Message, node: ReplyNode) -> None:
        """Record a reply after the messages of `match`."""
        place = self._end(match.root, match.place, match.keys)
        content = self._reply_key(message)
        if message.tool_calls:
            # Found by its minted ids or, if the client makes its own, by content.
            owner = _owner_key(message)
            minted = ((call.id, (owner, n)) for n, call in enumerate(message.tool_calls))
            self._minted.update(minted)
            place.next[owner] = place.next[content] = there = _Point(replies=[node])
        else:
            node.thinking = self._text_key(message.thinking)
            there = place.next.setdefault(content, _Point())
            there.replies.append(node)
        # The client may replay its prefill and the reply as one message: both keys lead here.
        if match.prefill:
            before = self._end(match.root, match.prefill.place, match.prefill.keys)
            whole = joined((match.prefill.message, message))
            for key in filter(None, (self._owner(whole), self._reply_key(whole))):
                before.next.setdefault(key, there)

    def discard(self, match: Match, message: Message, node: ReplyNode) -> None:
        """Remove a reply that `add` recorded and no client received."""
        key = _owner_key(message) if message.tool_calls else self._reply_key(message)
        # The empty place stays in the tree; `match` ignores a place without replies.
        self._end(match.root, match.place, match.keys).next[key].replies.remove(node)

    def _reply(
        self, replies: Sequence[ReplyNode], step: _Step, parent: ReplyNode | None
    ) -> ReplyNode | None:
        """Return the reply that a step means, of those with the same text; None without one.

        It is the newest with the thinking that the client sent, and of the branch walked so far.
        """
        if len(replies) < 2:
            return replies[0] if replies else None
        thinking = self._text_key(joined(step.messages).thinking)
        return max(
            reversed(replies),
            key=lambda reply: (
                reply.thinking == thinking != b"",
                reply.parent is parent,
                step.key != _BLANK or reply.index is not None,
            ),
        )

    def _root(self, tools: Sequence[Tool]) -> Key:
        offered, root = self._offered
        if tools != offered:
            self._offered = (tools, root := _tools_key(tools))
        return self._names.get(root, root)

    def _begin(self, root: Key, messages: Sequence[Message]) -> _Walked:
        """Return the longest kept walk over a request's first messages."""
        for earlier in sorted(self._walked, key=lambda earlier: -len(earlier.messages)):
            size, place = len(earlier.messages), earlier.walk.place
            # Another reply of the same text may be meant.
            is_alive = not place or place.replies == [earlier.walk.parent]
            fits = is_alive and earlier.root == root and messages[:size] == earlier.messages
            # A step ends where the roles change.
            if fits and len(messages) > size and messages[size].role is Role.ASSISTANT:
                return earlier
        return _Walked(root, (), _TreeWalk(self._roots.get(root)))

    def _keep(self, began: _Walked, walked: _Walked) -> None:
        """Keep a walk in place of the one that it continues, unless its messages are large."""
        new = walked.messages[len(began.messages) :]
        size = began.num_chars + num_chars(new)
        if walked.walk.here and walked.messages and size <= LONG_BYTES:
            gone = (began.messages, walked.messages)
            others = [earlier for earlier in self._walked if earlier.messages not in gone]
            self._walked = [replace(walked, num_chars=size), *others][:_MOST_WALKS]

    def _end(self, root: Key, place: _Point | None, keys: Sequence[Key]) -> _Point:
        """Return the place after these steps; make it if it is new."""
        name = self._names.setdefault(root, root)
        place = place or self._roots.setdefault(name, _Point())
        for key in keys:
            place = place.next.setdefault(key, _Point())
        return place

    def _walk(
        self, walk: _TreeWalk, steps: Iterator[_Step]
    ) -> Iterator[tuple[_Step, _Point | None, ReplyNode | None]]:
        """Yield each step with its place, None from the first unknown one on, and its reply."""
        here, parent = walk.here, walk.parent
        for whole, following in pairwise(chain(steps, (None,))):
            assert whole
            for step in self._parts(here, whole, following, parent):
                here = here.next.get(step.key) if here else None
                reply = self._reply(here.replies, step, parent) if here else None
                parent = reply or parent
                yield step, here, reply

    def _parts(
        self,
        here: _Point | None,
        step: _Step,
        following: _Step | None,
        parent: ReplyNode | None,
    ) -> Iterator[_Step]:
        """Yield the step, or the parts in which the tree has it, if the following step is there.

        A client may add assistant text of its own after a reply; the reply is still known. And it
        may drop a blank reply between two user messages; the reply is put back.
        """
        whole = here.next.get(step.key) if here else None
        if here is None or (whole and (following is None or following.key in whole.next)):
            yield step
            return
        splits = []
        for number in range(1, min(len(step.messages), _MOST_PARTS)):
            head, tail = self._halves(step, number)
            there = here.next.get(head.key)
            if there is None:
                continue
            # The known reply comes first, then the client's own text.
            if step.is_reply and there.replies:
                yield head
                parent = self._reply(there.replies, head, parent)
                yield from self._parts(there, tail, following, parent)
                return
            blank = there.next.get(_BLANK)
            if self._rereads or step.is_reply or blank is None:
                continue
            if reply := _delivered(blank.replies, parent):
                splits.append((tail.key in blank.next, number, head, tail, blank, reply))
        if not splits:
            yield step
            return
        _, _, head, tail, blank, reply = max(splits)
        yield head
        yield _Step(_BLANK, head.end, (Message(Role.ASSISTANT),))
        yield from self._parts(blank, tail, following, reply)

    def _halves(self, step: _Step, number: int) -> tuple[_Step, _Step]:
        head, tail = step.messages[:number], step.messages[number:]
        end = step.end - len(tail)
        return (
            _Step(self._key(head, step.before), end, head, step.before),
            _Step(self._key(tail, step.before), step.end, tail, step.before),
        )

    def _steps(self, messages: Sequence[Message], start: int = 0) -> Iterator[_Step]:
        """Yield the steps from a message on without blank messages, which clients drop."""
        run: list[Message] = []
        calls: tuple[ToolCall, ...] = ()
        end = start
        for position, message in enumerate(messages[start:], start + 1):
            if message.role in (Role.USER, Role.SYSTEM) and not message.text.strip():
                continue
            is_reply = message.role is Role.ASSISTANT
            # At a change of roles the step is complete.
            if run and is_reply != (run[0].role is Role.ASSISTANT):
                yield _Step(self._key(run, calls), end, tuple(run), calls)
                # Tool results answer the calls of the reply before them.
                calls = joined(run).tool_calls if not is_reply else ()
                run = []
            run.append(message)
            end = position
        if run:
            yield _Step(self._key(run, calls), end, tuple(run), calls)

    def _key(self, run: Sequence[Message], calls: Sequence[ToolCall]) -> Key:
        """Identify a step: a reply by its minted ids or content, other messages by content."""
        if run[0].role is Role.ASSISTANT:
            message = joined(run)
            return self._owner(message) or self._reply_key(message)
        # Some clients number calls by request, so a result is keyed by its call's number.
        numbers = {call.id: number for number, call in enumerate(calls)}
        places: dict[str, Hashable] = {}
        for call_id in {m.tool_call_id for m in run if m.role is Role.TOOL}:
            minted = self._minted.get(call_id)
            # A minted id names its call in every request; another id only within this one.
            places[call_id] = minted[1] if minted else numbers.get(call_id, call_id)
        results: set[Key] = set()
        texts: list[tuple[Role, list[str]]] = []
        for message in run:
            # Results of parallel calls come in any order, so they form a set.
            if message.role is Role.TOOL:
                results.add((places[message.tool_call_id], self._text_key(message.text)))
            elif texts and texts[-1][0] is message.role:
                texts[-1][1].append(message.text)
            else:
                texts.append((message.role, [message.text]))
        return (frozenset(results), *((role, self._text_key(*parts)) for role, parts in texts))

    def _reply_key(self, message: Message) -> Key:
        """Identify a reply by content, without thinking, which clients drop."""
        calls = tuple(map(_call_key, message.tool_calls))
        return (message.role, self._text_key(message.text), calls)

    def _text_key(self, *texts: str) -> bytes:
        """Identify consecutive texts, however they are cut; empty if they are blank."""
        texts_hash = hash(texts)
        # Histories repeat in every request, so most texts are found here.
        key = self._text_keys.get(texts_hash)
        if key is None:
            if len(self._text_keys) >= _MOST_TEXT_KEYS:
                self._text_keys.clear()
            self._text_keys[texts_hash] = key = _short(b"".join(map(_squeezed, texts)))
        return key

    def _owner(self, message: Message) -> Key | None:
        """Return the key of the reply whose minted call ids the message holds."""
        keys = (self._minted.get(call.id) for call in message.tool_calls)
        key = next(filter(None, keys), None)
        return key[0] if key else None


def _delivered(replies: Sequence[ReplyNode], parent: ReplyNode | None) -> ReplyNode | None:
    """Return the newest reply that was delivered, of the branch walked so far if there is one."""
    delivered = [reply for reply in reversed(replies) if reply.index is not None]
    return max(delivered, key=lambda reply: reply.parent is parent, default=None)


def _owner_key(message: Message) -> Key:
    return ("reply", message.tool_calls[0].id)


def _tools_key(tools: Sequence[Tool]) -> Key:
    """Identify the offered tools, in any order."""
    ordered = sorted(tools, key=lambda tool: tool.name)
    descriptions: Json = [[tool.name, tool.description, dict(tool.parameters)] for tool in ordered]
    return _short(_written(descriptions))


def tools_digest(root: Key) -> str:
    """Return a short name of the offered tools of a Match, the same in every process."""
    return hashlib.sha256(repr(root).encode()).hexdigest()[:12]


def _call_key(call: ToolCall) -> Key:
    """Identify a call by content: clients reorder its arguments and coerce their values."""
    arguments = ((key, _plain(value)) for key, value in call.arguments.items())
    # Arguments may be whole files, and the tree keeps every key.
    return (
        _short(_encoded(call.name)),
        frozenset((_short(_encoded(key)), _short(_encoded(value))) for key, value in arguments),
    )


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
    return _encoded(text).translate(None, _LEFT_OUT)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _short(text: bytes) -> bytes:
    if len(text) <= _SHORT:
        return text
    return hashlib.blake2b(text, digest_size=_SHORT).digest()


def _written(value: Json) -> bytes:
    """Write JSON in one canonical way. Raises GatewayError if it is nested too deeply."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise GatewayError(
            "a tool's parameters or a call's arguments are nested too deeply"
        ) from error
